"""What every node may be told by the router, whatever its role."""

from __future__ import annotations

import msgspec

from common.messages.router_inbox import Room


class Registered(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The router knows this incarnation now. A new router incarnation means: drop what the old one asked for."""

    router_incarnation: str


class Rejected(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The router will not use this node; `reason` is a sentence, and the node stops."""

    reason: str


class HeartbeatAck(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Echo: proves that the link works both ways. `known` is False for a node that was given up: it has to drop what
    it holds and register again."""

    router_incarnation: str
    sequence: int
    known: bool


class Abort(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Stop this room and free what it holds. Unknown rooms are ignored: abort and finish may cross."""

    room: Room
    reason: str


class PeerLost(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A node of the other role is gone: end its transfers."""

    incarnation: str


class Drain(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Take nothing new, finish what is here, say Goodbye, exit 0."""


AnyNodeMessage = Registered | Rejected | HeartbeatAck | Abort | PeerLost | Drain
