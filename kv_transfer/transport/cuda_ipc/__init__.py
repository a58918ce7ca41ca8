"""Same host, GPUs on both ends: the decode node's pool is one raw CUDA allocation, opened by its IPC handle.

A write is one kernel of the prefill node that gathers its own pages and stores them where they belong, on the
same GPU or over NVLink, or one such kernel per layer while a forward runs; it is done when its event is. Records
stay in a small shared memory segment. As with shm the receiver cannot shut the sender out: pages of a room that
ends early stay in quarantine until the sender confirms that it has stopped, or its process is proved dead.
"""
