"""Ways to record a callable: `none`, `full` and `breakable`, over CUDA graphs or over the CPU tape."""
