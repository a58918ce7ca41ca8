"""Identifies the sender of a message to the router, and checks that it may speak for the process that it names."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from common.errors import ProtocolError
from router.nodes.registry import Node


@dataclass(frozen=True, slots=True)
class MessageSender:
    """The sender of a message, parsed from the routing id of its socket: NAME/INCARNATION[/LINK]."""

    routing_id: bytes
    name: str
    incarnation: str
    link: str

    @classmethod
    @lru_cache(maxsize=4096)
    def of(cls, routing_id: bytes) -> MessageSender:
        """Parse a routing id. Raises ProtocolError if it is malformed."""
        parts = routing_id.decode("ascii").split("/")
        if len(parts) not in (2, 3):
            raise ProtocolError("the sender's routing id is not NAME/INCARNATION[/LINK]")
        return cls(routing_id, parts[0], parts[1], "/".join(parts[2:]))

    def check(self, node: Node) -> None:
        """Raise ProtocolError if `node`, which has this incarnation, is another process, perhaps with the same key."""
        if not (node.name == self.name and node.register.owns_link(self.link)):
            raise ProtocolError("its link is not one of those of the process for which it speaks")
