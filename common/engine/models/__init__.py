"""Models composed from layers by config; `registry.py` says which architecture is built how."""
