"""Composes the host memory of a decode node. If the node has none, the parts find and copy nothing."""

from __future__ import annotations

from collections.abc import Callable

from common.errors import ConfigError
from common.kv_cache.host_cache import HostCache
from common.kv_cache.host_plan import NoHostCopies
from common.kv_cache.page_space import PageSpace
from common.kv_cache.radix_cache import NO_OBSERVER, CacheObserver
from common.node.host_share import Exchange, HostShare, share_of_host
from decode_node.batch_rows import BatchRows
from decode_node.forwards import Forwards
from decode_node.host_fetches import HostEnds, HostFetches
from decode_node.host_tier import DecodePrefixes, DecodeTier, NoDecodeTier
from kv_transfer.transport.cuda.pool_copies import MovedPool

KEY = "decode.host_mib"
# The largest share of the memory that prefixes in the course of being stored leave to retracted requests.
SPARE_SHARE = 0.5

Tap = Callable[[int], CacheObserver]


def untapped(block_tokens: int) -> CacheObserver:
    """Return an observer that ignores which blocks are known."""
    return NO_OBSERVER


def host_share(
    nbytes: int, forwards: Forwards, exchange: Exchange, space: PageSpace | None = None
) -> HostShare | None:
    """Allocate the host memory of one rank of a node, if `nbytes` is not 0.

    Raises ConfigError if it would have no effect, or is more or less than can be used.

    Args:
        nbytes: of all ranks.
        exchange: gives this rank's bytes to the others and returns those of all ranks.
        space: of the node, which rank 0 checks for all.
    """
    if not nbytes:
        return None
    if space is not None and space.total_slots:
        raise ConfigError(
            KEY,
            "is not available for a model that keeps a state per request, which it would not hold; leave it out",
        )
    pool = forwards.layout, forwards.pools[0].storage
    return share_of_host(KEY, nbytes, forwards.layout.page_size, pool, None, MovedPool, exchange)


def host_fetches(memory: HostShare | None, clock: Callable[[], float]) -> HostFetches:
    """Return what a worker applies the copies of its plans with."""
    return HostFetches(NoHostCopies() if memory is None else memory.store, clock)


def host_tier(
    memory: HostShare | None,
    fetches: HostEnds,
    space: PageSpace,
    rows: BatchRows,
    backup_bytes: int,
    tap: Tap = untapped,
) -> DecodeTier:
    """Return what decides about host memory.

    Args:
        backup_bytes: bound of what retracted requests take of it. Prefixes that are being stored leave room for that.
        rows: copies are added to its moves.
        tap: given the tokens of a block, returns the listener that is told which blocks are known.
    """
    if memory is None:
        return NoDecodeTier()
    size = memory.layout.block_tokens
    blocks, nbytes = memory.layout.blocks, memory.items.page * memory.layout.block_pages
    spare = min(-(-backup_bytes // nbytes), int(SPARE_SHARE * blocks))
    cache = HostCache(size, blocks, observer=tap(size), spare_blocks=spare)
    return DecodePrefixes(cache, fetches, space, rows, memory.items.page)
