"""Finds the fastest layout of each model and size in few runs: what to run next, and when to stop."""
