"""Next tokens from logits: filters, penalties, draws and log-probabilities."""
