"""The tiny model that calls tools and thinks before it answers: its conversations, tokenizer, training and drafts."""
