"""Building blocks of a model: parameters, and the names that a checkpoint has for them."""
