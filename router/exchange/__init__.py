"""Exchanges information between the router processes of one host: series, timelines, loads, and requests to abort."""
