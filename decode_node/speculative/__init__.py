"""Speculative decoding: rounds of draft, verify and draft-extend, acceptance, and how many tokens are drafted."""
