"""Tests of `launchers.slurm` on a cluster that exists only on PATH; those on a real one are in `tests.slurm`."""
