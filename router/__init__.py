"""The only process that speaks HTTP and text: admits and places requests, retries them, merges tokens. No torch."""
