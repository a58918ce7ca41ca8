"""Turns requests into prompts: text jobs in worker processes, chats with images, and rules for tokens."""
