"""The CUDA graphs of a decode node: what is captured and how a step is replayed."""
