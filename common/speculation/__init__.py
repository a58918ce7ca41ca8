"""Speculative algorithms as records: how a draft's directory is read, what a round takes, what is refused. No torch."""
