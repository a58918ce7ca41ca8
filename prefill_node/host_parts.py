"""Composes the host memory of a node. If the node has none, the parts find and copy nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from common.errors import ConfigError
from common.kv_cache.host_cache import HostCache
from common.kv_cache.host_layout import HostLayout
from common.kv_cache.host_plan import HostCopies, HostMemory, NoHostCopies, RankStore
from common.kv_cache.page_space import PageSpace
from common.kv_cache.radix_cache import NO_OBSERVER, CacheObserver, NoPrefixCache
from common.node.host_share import Exchange, HostShare, ItemBytes, share_of_host
from kv_transfer.transport.cuda.pool_copies import MovedPool
from prefill_node.forwards import Forwards
from prefill_node.host_tier import HostPrefixes, HostTier, NoHostTier

KEY = "prefill.host_mib"


@dataclass(frozen=True, slots=True)
class HostParts:
    """The parts of a node that decide about host memory for cached prefixes and copy to and from it."""

    tier: HostTier = field(default_factory=NoHostTier)
    copies: HostCopies = field(default_factory=NoHostCopies)


def _untapped(page_tokens: int) -> CacheObserver:
    return NO_OBSERVER


def host_share(nbytes: int, grid: int, forwards: Forwards, exchange: Exchange) -> HostShare:
    """Allocate the host memory of one rank; see `share_of_host`. Raises ConfigError."""
    pool = forwards.layout, forwards.runner.pool.storage
    return share_of_host(KEY, nbytes, grid, pool, forwards.arriving.expect, MovedPool, exchange)


def make_host_parts(
    nbytes: int,
    grid: int,
    forwards: Forwards,
    space: PageSpace,
    exchange: Exchange = lambda own: (own,),
    of_all: Callable[[RankStore], RankStore] = lambda own: own,
    tap: Callable[[int], CacheObserver] = _untapped,
) -> HostParts:
    """Allocate the host memory of a node, or of its rank 0, if `nbytes` is not 0.

    Raises ConfigError if it would have no effect, or is more or less than can be used.

    Args:
        nbytes, grid, exchange: as in `host_share`, which the other ranks call.
        of_all: makes what stores on all ranks from the memory of rank 0.
        tap: given the tokens of a block, returns the listener that is told which blocks are known.
    """
    if not nbytes:
        return HostParts()
    if isinstance(space.cache, NoPrefixCache):
        raise ConfigError(
            KEY,
            "would have no effect: the model keeps a state per request, and prefill.state_snapshots is 0; leave it "
            "out, or write a larger prefill.state_snapshots",
        )
    share = host_share(nbytes, grid, forwards, exchange)
    store, observer = of_all(share.store), tap(share.layout.block_tokens)
    return HostParts(host_prefixes(share.layout, share.items, store, space, observer), store)


def host_prefixes(
    layout: HostLayout,
    items: ItemBytes,
    memory: HostMemory,
    space: PageSpace,
    observer: CacheObserver = NO_OBSERVER,
) -> HostPrefixes:
    """Return what decides about `memory`."""
    cache = HostCache(layout.block_tokens, layout.blocks, layout.slots, observer)
    return HostPrefixes(cache, memory, space, (items.page, items.state))
