"""Runs one attempt at a point: its folder, watchdog, outcome, table rows and loss comparison."""
