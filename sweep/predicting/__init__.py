"""Predictions for points of a plan and for rows of any table, and their grades."""
