"""Turns a request's fields for structured output into one grammar."""
