"""Computes prompts and hands over the KV pages of target and draft, the first token and the draft's state."""
