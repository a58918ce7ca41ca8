"""The container image: its steps as scripts, and their rehearsal without a container engine."""
