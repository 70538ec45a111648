"""Experiments: their description, cost and execution."""
