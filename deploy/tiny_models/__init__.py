"""The tiny trained models: their task, tokenizer, training data, training programs and checkpoints."""
