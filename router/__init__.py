"""The only process that speaks HTTP and text: it admits, places and retries requests and merges their token streams.

Nothing in this package imports torch.
"""
