"""Starts, supervises, checks and evaluates clusters: commands, cluster files and the tiny models."""
