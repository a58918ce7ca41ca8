"""Composes the host memory of a node; without any, its parts find and copy nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from common.engine.host_memory import GIB, host_memory
from common.errors import ConfigError
from common.kv_cache.host_cache import HostCache
from common.kv_cache.host_layout import HostLayout, host_layout
from common.kv_cache.host_plan import HostCopies, NoHostCopies
from common.kv_cache.page_space import PageSpace
from common.kv_cache.pool_layout import PoolLayout
from common.kv_cache.radix_cache import NO_OBSERVER, CacheObserver, NoPrefixCache
from common.node.host_lane import host_lane
from common.node.host_store import HostStore, Lanes, host_bytes
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


def make_host_parts(
    nbytes: int,
    grid: int,
    forwards: Forwards,
    space: PageSpace,
    tap: Callable[[int], CacheObserver] = _untapped,
) -> HostParts:
    """Allocate the host memory of a node, if `nbytes` is not 0.

    Raises ConfigError if it would have no effect, or is more or less than can be used.

    Args:
        grid: tokens at whose multiples the state of a prompt is saved; used for models that keep a state per request.
        tap: returns what hears which blocks, of so many tokens, are known.
    """
    if not nbytes:
        return HostParts()
    if isinstance(space.cache, NoPrefixCache):
        raise ConfigError(
            KEY,
            "would have no effect: the model keeps a state per request, and prefill.state_snapshots is 0; leave it "
            "out, or write a larger prefill.state_snapshots",
        )
    memory = host_memory()
    if nbytes > memory:
        raise ConfigError(
            KEY, f"{nbytes / GIB:.1f} GiB are more than the {memory / GIB:.1f} GiB of this machine's memory"
        )
    try:
        layout = host_layout(forwards.layout, nbytes, grid)
    except ValueError as error:
        raise ConfigError(KEY, f"{error}; write a larger value, or 0") from error
    device = forwards.runner.pool.device
    lanes = Lanes(host_lane(device), host_lane(device))
    memory_of = host_bytes(layout.planes.total_bytes, device)
    pool = forwards.layout, forwards.runner.pool.storage
    store = HostStore(layout, memory_of, pool, forwards.arriving.expect, lanes, MovedPool(*pool))
    observer = tap(layout.block_tokens)
    return HostParts(host_prefixes(layout, forwards.layout, store, space, observer), store)


def host_prefixes(
    layout: HostLayout,
    device: PoolLayout,
    store: HostStore,
    space: PageSpace,
    observer: CacheObserver = NO_OBSERVER,
) -> HostPrefixes:
    """Return what decides about the memory of `store`."""
    cache = HostCache(layout.block_tokens, layout.blocks, layout.slots, observer)
    state_bytes = sum(each.page_bytes for each in device.placed) - device.page_bytes
    return HostPrefixes(cache, store, space, (device.page_bytes, state_bytes))
