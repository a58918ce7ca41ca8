"""The CUDA graphs of prompts: what a prefill node captures and how each graph is replayed."""
