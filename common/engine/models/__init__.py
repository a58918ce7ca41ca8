"""Models: the decoder, whose layers the config selects, draft heads, vision parts; `model_registry.py` builds them."""
