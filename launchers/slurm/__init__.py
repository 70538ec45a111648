"""Slurm jobs that run pilots: compares the needed jobs with the existing ones and submits the difference. Only Slurm
runs import it."""
