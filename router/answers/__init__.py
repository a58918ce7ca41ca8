"""Shows an answer to its client: tokens become text, text becomes JSON or events."""
