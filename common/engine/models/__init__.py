"""Models: the decoder that is composed of layers by config, draft heads, vision parts. `registry.py` builds by name."""
