"""Random bytes of the operating system, fetched in blocks: for a few bytes, the system call costs more than the rest.

They are as unpredictable as those of `secrets`. Each byte is given out once; a process that forks begins a new block.
"""

from __future__ import annotations

import os

BLOCK = 4096

_block = bytearray()


def random_bytes(size: int) -> bytes:
    """Return `size` random bytes, at most BLOCK. Called by one thread of a process."""
    if len(_block) < size:
        _block.extend(os.urandom(BLOCK))
    taken = bytes(_block[-size:])
    del _block[-size:]
    return taken


def random_bits(count: int) -> int:
    """Return a number of `count` random bits."""
    size = (count + 7) >> 3
    return int.from_bytes(random_bytes(size), "little") >> 8 * size - count


def random_hex(size: int) -> str:
    """Return `size` random bytes as hexadecimal digits."""
    return random_bytes(size).hex()


os.register_at_fork(after_in_child=_block.clear)
