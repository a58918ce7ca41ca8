"""The load of all nodes together: which pages count as used, and which nodes count."""

from __future__ import annotations

from common.messages.identity import NodeLoad, Role
from router.nodes.pool_load import PoolLoad, pool_load
from router.nodes.registry import Node
from tests.unit.router.nodes.test_registry import register


def node(role: Role, name: str, load: NodeLoad) -> Node:
    return Node(register(role, name, page_size=16, total_pages=100), 0.0, load=load)


def test_sums_requests_and_tokens_of_nodes() -> None:
    pages = NodeLoad(running=3, queued=2, total_pages=100, free_pages=60, cached_pages=30)
    standby = node("decode", "standby", pages)
    standby.state = "standby"
    nodes = [
        node(
            "prefill", "p0", NodeLoad(running=1, queued=2, queued_tokens=700, total_pages=100, free_pages=1)
        ),
        node("decode", "d0", pages),
        node("decode", "d1", NodeLoad()),  # before its first heartbeat
        standby,
    ]
    assert pool_load(nodes) == PoolLoad(running=3, used=160, total=3200, prompts=700)
    assert pool_load([]) == PoolLoad(0, 0, 0, 0)
