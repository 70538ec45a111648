"""Slurm jobs that run pilots: what is submitted, what is there, and the difference. Only Slurm runs import it."""
