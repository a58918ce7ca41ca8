"""How products keep and multiply their weights: a module for each format, and one place that chooses by the config."""
