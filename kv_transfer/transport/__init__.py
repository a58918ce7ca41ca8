"""Ways to write into a peer's memory, a folder each: its record (kind.py), its sender and its receiver.

base.py states what an endpoint promises. This is the only part of kv_transfer that may touch device memory.
"""
