"""How pictures are drawn: the look of figures, artists that draw many marks at once, and writers of PNG and SVG."""
