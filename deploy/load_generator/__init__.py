"""Sends requests to OpenAI-compatible servers at planned times and measures their streams."""
