"""How matrix products store and multiply their weights: one module per format; `registry.py` selects by config."""
