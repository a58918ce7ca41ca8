"""The ranks of a node: processes that apply the plans of rank 0, each to a device of its own."""
