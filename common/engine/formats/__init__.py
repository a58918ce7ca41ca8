"""Weight formats of matrix products, one module each; `registry.py` selects one by the config."""
