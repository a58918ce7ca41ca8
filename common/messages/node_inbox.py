"""Messages from the router to nodes of both roles."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from common.messages.identity import Finite, Label, Role
from common.messages.protocol import UNVERSIONED
from common.messages.router_inbox import Room

MAX_PROFILE_SECONDS = 60.0
MAX_PROFILE_STEPS = 1_000


class Registered(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The router has registered this incarnation.

    A new router incarnation means: drop the requests of the old one.
    """

    router_incarnation: str
    protocol_version: int = UNVERSIONED  # a decoder's default; see common/messages/protocol.py


class Rejected(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The router will not use this node; `reason` is a sentence, and the node stops."""

    reason: str


class HeartbeatAck(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Echo of a heartbeat: proves that the link works both ways.

    `known` is False for a node that the router has given up: it must drop its requests and register again.
    """

    router_incarnation: str
    sequence: int
    known: bool


class Abort(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Asks to stop this room and free its resources.

    Unknown rooms are ignored, since an abort and a finish may cross.
    """

    room: Room
    reason: str


class PeerLost(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A node of the other role has ended: the receiver ends its transfers."""

    incarnation: str


class PeerDraining(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A decode node drains, and others can take its requests: the receiver, a prefill node, gives back the router's
    prompts for it that have not begun.

    Sent after the last prompt for that node, and handled in order.
    """

    incarnation: str


class FlushCache(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Asks to empty the prefix cache before any request that follows. Pages that requests still use stay."""


class Profile(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Asks to record what the node computes, until `seconds` have passed or it has taken `steps`.

    The answer is ProfileEnded.
    """

    order: Label
    seconds: Annotated[float, Meta(gt=0, le=MAX_PROFILE_SECONDS)]
    steps: Annotated[int, Meta(ge=1, le=MAX_PROFILE_STEPS)]


class ChangeRole(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Asks a movable node to finish its requests and then to take those of another role.

    The answer is ChangeAnswered: of several routers that ask for changes, the node follows one. Its heartbeats say how
    far it is. If requests are left after `seconds`, it stays in its role.
    """

    order: Label
    router: Label  # name of the router's process, which the node tells the others
    role: Role
    seconds: Finite


AnyNodeMessage = (
    Registered | Rejected | HeartbeatAck | Abort | PeerLost | PeerDraining | FlushCache | Profile | ChangeRole
)
