"""Allocates the share that one rank of a prefill node has of its host memory for cached prefixes."""

from __future__ import annotations

from common.node.host_share import Exchange, HostShare, share_of_host
from kv_transfer.transport.cuda.pool_copies import MovedPool
from prefill_node.forwards import Forwards

KEY = "prefill.host_mib"


def host_share(nbytes: int, grid: int, forwards: Forwards, exchange: Exchange) -> HostShare:
    """Allocate the share of one rank; see `share_of_host`. Raises ConfigError."""
    pool = forwards.layout, forwards.runner.pool.storage
    return share_of_host(KEY, nbytes, grid, pool, forwards.arriving.expect, MovedPool, exchange)
