"""Tells all nodes to empty their prefix caches."""

from __future__ import annotations

from collections.abc import Iterable

from common.messages.node_inbox import FlushCache
from router.nodes.outbox import Send
from router.nodes.registry import Node


def flush_caches(nodes: Iterable[Node], send: Send) -> list[str]:
    """Send the message to every node; return the names of those that it cannot reach.

    Messages of a node arrive in order, so requests that are placed afterwards find empty caches.
    """
    return [node.name for node in nodes if not send(node.routing_id, FlushCache())]
