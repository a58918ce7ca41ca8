"""Ways to record a callable: `none`, `full`, `breakable` and `piecewise`, over CUDA graphs or over the CPU tape."""
