"""Cells of tables: their numbers, and the degrees of a layout that they give."""
