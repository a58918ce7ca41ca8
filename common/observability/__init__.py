"""What operators see of a process: structured logs with node and request, start-up progress, the event log."""
