"""Speculative decoding: drafts, their verification by the target, and what is accepted."""
