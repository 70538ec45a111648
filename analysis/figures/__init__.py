"""One file a figure: it draws a frame of comparable, labelled rows (`analysis.rows.cohorts`) or says what it lacks."""
