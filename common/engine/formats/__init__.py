"""Weight formats of matrix products, one module each; `format_registry.py` makes the one that the config names."""
