"""What at least two processes share.

Without torch: errors, config, messages, sockets, logs, the reading of model directories, planes and pages, and the
records of layer kinds, weight formats and speculative algorithms. `engine` runs forward passes: torch starts there.
"""
