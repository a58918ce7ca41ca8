"""Transfers of a node with several tensor-parallel ranks: one process decides, and each rank moves its own part.

    rank 0: ReceiverGroup or SenderGroup, in the place of the node's Receiver or Sender
        |  commands, to all ranks          ^  reports, of each rank
        v                                  |
    ranks 1..: ReceiverRank or SenderRank, each with a Receiver or Sender, an endpoint and peer sockets of its own

A room is as far as its slowest rank, and fails on all ranks if it fails on one. Nothing here waits for a rank of
the same node that has ended or hangs: that ends the node.
"""
