"""Code around the engine that both roles share: life cycle, loop, memory plan, serving model, link to the router."""
