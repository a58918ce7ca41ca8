"""Takes prompts that have not begun back from prefill nodes when their decode node drains.

Otherwise a node that drains, as for a change of its role, would wait for the whole backlog of the prefill nodes. The
prefill node decides, since only it knows which prompts have begun; those that it gives back are placed again.
"""

from __future__ import annotations

from collections.abc import Callable

from common.messages.node_inbox import PeerDraining
from router.nodes.registry import Node, NodeRegistry


class DrainingDecode:
    """Tells prefill nodes once about each decode node that drains, as soon as another one takes requests."""

    def __init__(self, registry: NodeRegistry, post: Callable[[Node, PeerDraining], None]) -> None:
        """`post` sends a message to a node, and repeats that while the node cannot be reached."""
        self._registry = registry
        self._post = post
        self._notified: set[str] = set()  # incarnations

    def nodes_changed(self) -> None:
        """Look at the nodes after a change of the registry."""
        draining = {
            node.incarnation: node
            for node in self._registry
            if node.role == "decode" and node.state == "draining"
        }
        self._notified &= draining.keys()
        fresh = draining.keys() - self._notified
        if fresh and self._registry.eligible_by_role().of["decode"]:
            self._notified |= fresh
            for incarnation in fresh:
                self._notify(draining[incarnation])

    def _notify(self, node: Node) -> None:
        for other in self._registry:
            if other.role == "prefill":
                self._post(other, PeerDraining(incarnation=node.incarnation))
