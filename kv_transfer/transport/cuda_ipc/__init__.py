"""Transport between GPUs of one host: the decode node's pool is a raw CUDA allocation, opened by its IPC handle.

A write is one kernel of the prefill node that gathers its own pages and stores them at their destination, on the same
GPU or over NVLink, or one such kernel per layer while a forward runs. It is done when its event is. Records use a
small shared memory segment. As with shm, the receiver cannot revoke the sender's access: pages of a room that ends
early stay in quarantine until the sender confirms that it has stopped, or its process is known to be dead.
"""
