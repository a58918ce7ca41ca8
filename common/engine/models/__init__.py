"""Models: the decoder, whose layers the config selects, draft heads, vision parts. `registry.py` builds by name."""
