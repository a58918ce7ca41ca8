"""Transport within one host: the decode node's pool is shared memory into which the prefill node copies.

A write is one memcpy per copy and is done when `write` returns. The receiver cannot revoke the sender's access, so
pages of a room that ends early stay in quarantine until the sender confirms that it has stopped, or a pidfd proves
that its process ended.
"""
