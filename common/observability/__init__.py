"""Reports to operators: structured logs with node and request, start-up progress, the event log."""
