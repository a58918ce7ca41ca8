"""One script per client that is a command: it starts the command and judges its output. Run by this Python."""
