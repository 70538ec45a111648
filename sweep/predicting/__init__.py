"""Predictions for points of a plan and rows of any table, and grades of these predictions."""
