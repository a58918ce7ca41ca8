"""The ranks of one node exchange tensors here; layers get modules that combine what the ranks have computed."""
