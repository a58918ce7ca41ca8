"""What a person sees of a process: structured logs with request and node, start-up progress."""
