"""What at least two processes share.

Without torch: `config`, `messages`, `ipc`, `observability`, `checkpoint` (reads model directories), `speculation` (a
record per algorithm) and `kv_cache` (planes and pages as values). `engine` runs forward passes: torch starts there.
`node` is what both kinds of node wrap around the engine.
"""
