"""Attention backends: the only code that reads a batch's metadata during a forward pass."""
