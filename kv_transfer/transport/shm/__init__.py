"""Same host: the decode node's pool is shared memory, and the prefill node copies into it.

A write is one memcpy per copy and is done when `write` returns. The receiver cannot shut the sender out, so
pages of a room that ends early stay in quarantine until the sender confirms that it has stopped, or a pidfd proves that
its process ended.
"""
