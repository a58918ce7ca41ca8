"""KV pages, a first token and draft state in; tokens out, many requests per step."""
