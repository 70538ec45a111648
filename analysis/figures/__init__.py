"""One file a figure; each draws one frame of comparable, labelled rows (`analysis.cohorts`) or says what is missing."""
