"""Reads bodies of HTTP requests and writes responses: JSON, server-sent events and errors."""
