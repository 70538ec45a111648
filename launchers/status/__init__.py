"""Reads from a sweep's files where it stands, and shows it while it runs."""
