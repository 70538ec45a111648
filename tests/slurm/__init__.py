"""Tests on a real Slurm of virtual nodes."""
