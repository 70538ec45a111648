"""Bytes that one rank sends, and how long a collective takes."""
