"""What both kinds of node wrap around the engine: life, loop, memory plan, serving model, link to the router."""
