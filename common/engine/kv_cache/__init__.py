"""The KV pool as tensors: planes of pages, the page table of running requests, and their relay rows."""
