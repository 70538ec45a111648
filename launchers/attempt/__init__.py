"""One attempt at a point: its folder, the watchdog, the outcome, its rows, the comparison of losses."""
