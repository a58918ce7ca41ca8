"""Runs requests on pairs of nodes: admission, attempts, retries, and the search for a request that crashes nodes."""
