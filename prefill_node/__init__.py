"""Prompts in; KV pages, the first token and the draft's state out to a decode node."""
