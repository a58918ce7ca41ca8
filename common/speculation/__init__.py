"""Speculative algorithms as records: how a draft's directory is read, and the slots of a round. No torch."""
