"""Gets the images of a chat: fetches, decodes and checks them, each in a process of its own."""
