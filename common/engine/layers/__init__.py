"""Building blocks of a model: mixers, feed-forwards, norms, products, and the checkpoint pieces that they read."""
