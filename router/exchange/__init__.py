"""Exchanges what the router processes of one host know: series, timelines, loads, and requests to abort."""
