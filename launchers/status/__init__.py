"""The status of a sweep, read from its files, and the live view of a run."""
