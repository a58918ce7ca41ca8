"""The KV pool as tensors: its planes, the page table of running requests, and their relay rows."""
