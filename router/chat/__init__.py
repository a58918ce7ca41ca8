"""Tools and reasoning in chats: checks the fields of requests, and parses answers into messages with tool calls."""
