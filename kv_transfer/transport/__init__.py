"""The means of writing into a peer's memory; the only place of kv_transfer that may touch device memory."""
