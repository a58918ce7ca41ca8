"""The paged KV cache: the pool of pages and who owns which page."""
