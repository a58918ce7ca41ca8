"""Gets the images of a chat: fetches, decodes and checks them in separate processes."""
