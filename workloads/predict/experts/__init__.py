"""Routed experts in predictions: of plans, and of the rows of tables."""
