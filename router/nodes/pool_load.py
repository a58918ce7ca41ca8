"""Sums the load of the nodes, as their last heartbeats reported it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from router.nodes.registry import Node


@dataclass(frozen=True, slots=True)
class PoolLoad:
    """Requests on the nodes, of all routers, and the KV cache of the decode nodes, in tokens."""

    running: int  # requests in the batches of decode nodes
    used: int  # in pages that hold requests, so without pages that only the prefix cache holds
    total: int
    prompts: int  # tokens of prompts that prefill nodes have not computed yet


def pool_load(nodes: Iterable[Node]) -> PoolLoad:
    running = used = total = prompts = 0
    for node in nodes:
        load, size = node.load, node.register.page_size
        if node.role == "prefill":
            prompts += load.queued_tokens
        elif node.state != "standby":
            running += load.running
            used += (load.total_pages - load.free_pages - load.cached_pages) * size
            total += node.register.total_pages * size
    return PoolLoad(running, used, total, prompts)
