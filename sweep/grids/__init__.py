"""Grids: axes, derived values and filters, expanded to points."""
