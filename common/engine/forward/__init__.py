"""What goes into a forward pass and what comes out of it."""
