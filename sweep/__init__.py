"""The command `python -m sweep`: grids, plans, predictions, runs, searches and exports."""
