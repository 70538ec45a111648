"""The modules of a transformer, and how they recompute their outputs."""
