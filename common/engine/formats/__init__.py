"""How matrix products store and multiply their weights: a module per format; `registry.py` chooses by the config."""
