"""Transport between any two hosts, CPUs or GPUs: NIXL over UCX, so RDMA if available, else TCP or shared memory.

A write is a few NIXL transfers of at most max_inflight_bytes each; it has landed when the last of them is done, and
only then the record is posted (two transfers are not ordered with each other). The receiver cannot revoke one
sender's access: pages of a room that ends early stay in quarantine until the sender confirms that it has stopped, or
its liveness connection proves that its process ended.
"""
