"""Tests of `launchers.pilot`."""
