"""Ways to capture a callable: `none`, `full`, `breakable` and `piecewise`, with CUDA graphs or with the CPU tape."""
