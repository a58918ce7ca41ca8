"""Batches: what goes into a forward pass of a target or a draft and what comes out of it."""
