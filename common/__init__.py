"""What at least two processes share: errors, messages, config, sockets, logs, and (torch starts there) the engine."""
