"""Allocates the share that one rank has of a node's host memory for cached prefixes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import msgspec
from torch import Tensor

from common.engine.host_memory import GIB, host_memory
from common.errors import ConfigError
from common.kv_cache.host_layout import HostLayout, host_layout
from common.kv_cache.pool_layout import PoolLayout
from common.node.host_bytes import HostBytes
from common.node.host_lane import host_lane
from common.node.host_store import Expect, HostStore, Lanes, PoolCopies

# Gives this rank's bytes to the others and returns those of all ranks, in their order.
Exchange = Callable[[bytes], Sequence[bytes]]


class ItemBytes(msgspec.Struct, frozen=True):
    """The bytes of a page, and of the state of a request."""

    page: int
    state: int

    @classmethod
    def of(cls, pool: PoolLayout) -> ItemBytes:
        """Return what one rank keeps of them."""
        return cls(pool.page_bytes, sum(each.page_bytes for each in pool.placed) - pool.page_bytes)


class _Room(msgspec.Struct, frozen=True):
    """The items that one rank has room for."""

    pages: int
    slots: int
    items: ItemBytes


@dataclass(frozen=True, slots=True)
class HostShare:
    """The host memory of one rank."""

    store: HostStore
    layout: HostLayout
    items: ItemBytes  # on all ranks together


def share_of_host(
    key: str,
    nbytes: int,
    grid: int,
    pool: tuple[PoolLayout, Tensor],
    expect: Expect | None,
    copies: Callable[[PoolLayout, Tensor], PoolCopies],
    exchange: Exchange,
) -> HostShare:
    """Allocate the share of one rank. All ranks get the same numbers of pages and slots.

    Raises ConfigError for `key` if it is more or less than can be used.

    Args:
        nbytes: of all ranks.
        grid: tokens at whose multiples the state of a prompt is saved; used for models that keep a state per request.
        pool: layout and storage of the device's pool.
        expect: see HostStore.
        copies: makes what copies to and from the pool.
        exchange: gives this rank's bytes to the others and returns those of all ranks.
    """
    memory = host_memory()
    if nbytes > memory:
        raise ConfigError(
            key,
            f"{nbytes / GIB:.1f} GiB are more than the {memory / GIB:.1f} GiB of this machine's memory, or of what its "
            "container may use; write a smaller value",
        )
    ours, storage = pool
    try:
        layout = host_layout(ours, nbytes // ours.tp_size, grid)
    except ValueError as error:
        raise ConfigError(key, f"{error}; write a larger value, or 0") from error
    own = _Room(layout.planes.num_pages, layout.planes.num_slots, ItemBytes.of(ours))
    rooms = [msgspec.msgpack.decode(each, type=_Room) for each in exchange(msgspec.msgpack.encode(own))]
    pages, slots = min(each.pages for each in rooms), min(each.slots for each in rooms)
    planes = msgspec.structs.replace(layout.planes, num_pages=pages, num_slots=slots)
    layout = replace(layout, planes=planes)
    device = storage.device
    lanes = Lanes(host_lane(device), host_lane(device))
    memory_of = HostBytes(planes.total_bytes, device)
    store = HostStore(layout, memory_of, pool, expect, lanes, copies(*pool))
    items = [each.items for each in rooms]
    return HostShare(
        store, layout, ItemBytes(sum(each.page for each in items), sum(each.state for each in items))
    )
