"""Renders chats with the model's template, in a sandbox."""
