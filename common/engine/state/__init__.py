"""What a request keeps on the device between steps: KV pages and relay rows."""
