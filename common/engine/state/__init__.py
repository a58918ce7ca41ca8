"""The device state of requests between steps: KV pages and relay rows."""
