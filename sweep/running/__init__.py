"""Commands that run something: run, probe, parity."""
