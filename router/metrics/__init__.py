"""Records what the router does: series for /metrics and the timelines of requests."""
