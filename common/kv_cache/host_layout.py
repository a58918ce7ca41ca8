"""The layout of a node's host memory for cached prefixes: the planes of its pool, with other numbers of items."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from msgspec import structs

from common.kv_cache.pool_layout import PLANE_ALIGN, PoolLayout

# Tokens of a block. Checksums of large parts are computed without Python's interpreter lock.
BLOCK_TOKENS: Final = 256
STATE_SHARE: Final = 0.25  # of the memory, for the states of models that keep one per request


@dataclass(frozen=True, slots=True)
class HostLayout:
    """Blocks of some whole pages, and slots, of the same planes as the device's pool. Block 0 and slot 0 are unused."""

    planes: PoolLayout
    block_pages: int

    @property
    def block_tokens(self) -> int:
        return self.block_pages * self.planes.page_size

    @property
    def blocks(self) -> int:
        """Number of blocks that can be used."""
        return self.planes.num_pages // self.block_pages - 1

    @property
    def slots(self) -> int:
        """Number of slots that can be used; 0 for a model that keeps no state per request."""
        return max(self.planes.num_slots - 1, 0)


def host_layout(device: PoolLayout, nbytes: int, grid: int) -> HostLayout:
    """Divide `nbytes` of host memory for the planes of a device's pool.

    Raises ValueError with the least number of bytes if there is no room for one block (and one state).

    Args:
        grid: tokens at whose multiples the state of a prompt is saved; used for models that keep a state.
    """
    keeps_state = device.num_slots > 0
    unit = grid if keeps_state else device.page_size
    block_pages = (unit if keeps_state else math.ceil(BLOCK_TOKENS / unit) * unit) // device.page_size
    room = nbytes - PLANE_ALIGN * (len(device.placed) + 1)
    state_bytes = sum(each.page_bytes for each in device.placed) - device.page_bytes
    slots = max(int(STATE_SHARE * room) // state_bytes, 2) if keeps_state else 0
    blocks = (room - slots * state_bytes) // (block_pages * device.page_bytes)
    if blocks < 2:
        least = 2 * (block_pages * device.page_bytes + state_bytes * keeps_state)
        raise ValueError(
            f"{nbytes} bytes leave no room for a block of {block_pages} pages: at least "
            f"{least + nbytes - room} are needed"
        )
    planes = structs.replace(device, num_pages=blocks * block_pages, num_slots=slots)
    return HostLayout(planes, block_pages)
