"""Ways to capture a callable that every role may use: `none` and `full`, with CUDA graphs or with the CPU tape."""
