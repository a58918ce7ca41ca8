"""The tiny trained family: its task, tokenizer, training data, training programs and checkpoints."""
