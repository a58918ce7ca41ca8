"""The prompt graphs: what a prefill node captures and how each is replayed."""
