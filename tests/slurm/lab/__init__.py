"""A real Slurm for tests: scripts that bring up a throw-away cluster of virtual nodes, and `Lab`, which breaks it."""

from tests.slurm.lab.lab import Job, Lab, why_not

__all__ = ["Job", "Lab", "why_not"]
