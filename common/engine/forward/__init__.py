"""Batches: the inputs and outputs of a forward pass of a target or a draft, and the runners."""
