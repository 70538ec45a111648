"""Measuring on one rank: timed steps, device state, launch overhead, profiles."""
