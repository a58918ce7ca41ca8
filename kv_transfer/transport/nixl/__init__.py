"""Any two hosts, pools on CPUs or on GPUs: NIXL over UCX, so RDMA where there is any, else TCP or shared memory.

A write is a few NIXL transfers of at most max_inflight_bytes each; they have landed when the last of them says so,
and only then the record is posted (two transfers are not ordered with each other). The receiver cannot shut one
sender out: pages of a room that ends early stay in quarantine until the sender confirms that it has stopped, or a
lifeline proves that its process ended.
"""
