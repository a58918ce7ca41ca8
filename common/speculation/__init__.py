"""Speculative algorithms, a record each: how a draft's directory is read and what a round takes. No torch."""
