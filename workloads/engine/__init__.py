"""The training engine, one file for each axis of parallelism."""
