"""The only process that speaks HTTP and text: places requests, merges their tokens, never imports torch."""
