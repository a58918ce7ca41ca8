"""Building blocks of a model: mixers, feed-forwards, norms, products, and the pieces of a checkpoint that they read."""
