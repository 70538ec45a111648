"""Cells of tables: their words and numbers, and the degrees of a layout and the shape of a model that they give."""
