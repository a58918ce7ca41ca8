"""Ways to write into a peer's memory, one folder each: its record (kind.py), its sender and its receiver.

base.py states the contract of an endpoint. This is the only part of kv_transfer that may touch device memory.
"""
