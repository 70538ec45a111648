"""Figures, one per file: each draws a frame of comparable, labelled rows (`analysis.rows.cohorts`) or says what is
missing."""
