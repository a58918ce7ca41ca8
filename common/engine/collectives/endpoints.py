"""Opens what the ranks of one host share: memory without a name, and a pair of sockets for every two ranks.

Rank 0 opens all endpoints, passes each of the others to the process that it starts, and closes its own copy:

    endpoints = open_endpoints(size)
    Popen([..., msgspec.json.encode(endpoint).decode()], pass_fds=endpoint.descriptors)
    endpoint.close()

Nothing has a name in a file system, so nothing is left when processes are killed, and a process that ends closes its
sockets, which the others notice at once.
"""

from __future__ import annotations

import os
import socket

import msgspec

HEADER_BYTES = 64
SLOT_BYTES = 1 << 20  # longer tensors take several rounds


class GroupEndpoint(msgspec.Struct, frozen=True):
    """Descriptors of one rank, which `SharedMemoryGroup` takes over."""

    rank: int
    size: int
    slot_bytes: int
    memory: int
    peers: tuple[int, ...]  # sockets to the other ranks, in their order

    @property
    def descriptors(self) -> tuple[int, ...]:
        """All of them, as `pass_fds` of the process that gets this endpoint."""
        return (self.memory, *self.peers)

    def close(self) -> None:
        """Close the descriptors in this process."""
        for each in self.descriptors:
            os.close(each)


def open_endpoints(size: int, slot_bytes: int = SLOT_BYTES) -> list[GroupEndpoint]:
    """Open a group of `size` ranks and return the endpoint of each rank.

    Args:
        slot_bytes: bytes of a tensor that ranks exchange in one round; a multiple of 64.
    """
    assert slot_bytes > 0, "a slot holds bytes"
    assert slot_bytes % HEADER_BYTES == 0, "slots are aligned to 64 bytes"
    memory = os.memfd_create("tandem-ranks", os.MFD_CLOEXEC)
    os.truncate(memory, 2 * size * (HEADER_BYTES + slot_bytes))
    peers: list[dict[int, int]] = [{} for _ in range(size)]
    for first in range(size):
        for second in range(first + 1, size):
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
            peers[first][second], peers[second][first] = ours.detach(), theirs.detach()
    endpoints = [
        GroupEndpoint(
            rank, size, slot_bytes, os.dup(memory), tuple(peers[rank][each] for each in sorted(peers[rank]))
        )
        for rank in range(size)
    ]
    os.close(memory)
    return endpoints
