"""Runs a cluster as one Slurm job with a step per process: the batch script, and the cluster file that it needs."""
