"""Speculative decoding: rounds of draft, verify and draft-extend, the acceptance rule, and the number of drafts."""
