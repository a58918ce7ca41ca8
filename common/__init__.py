"""Code shared by at least two processes.

Without torch: `config`, `messages`, `ipc`, `observability`, `checkpoint` (reads model directories), `speculation`
(one record per algorithm), `kv_cache` (planes and pages as values) and `grammar` (what constrained requests may say:
limits, compilation, token masks). With torch: `engine` runs forward passes, and
`node` is the code around the engine that both roles share.
"""
