"""Pilots, their nodes and attempts: on this machine or through Slurm."""
