"""Submits pilots to Slurm, watches them and cancels them. A run on one machine imports nothing of it."""
