"""Pilots: processes that hold an allocation and run the points of a sweep on its nodes."""
