"""KV events in vLLM's format: what a node's prefix caches hold, published by nodes and read by routers. No torch."""
