"""Whether a message may say what its routing id claims: the key of its connection must belong to that NAME."""

from __future__ import annotations

from typing import NamedTuple, cast

import zmq

from common.ipc.allow_list import AllowList

USER_ID = "User-Id"  # set by the ZAP handler: the public key
BAN_SECONDS = 10.0  # during which the key of a peer that was cut off is refused


class Misuse(NamedTuple):
    """A frame that its connection's key does not allow."""

    culprit: str  # NAME of the key, or its beginning where it belongs to nobody (any more)
    reason: str


def name_in(routing_id: bytes) -> str:
    """NAME of NAME/INCARNATION[/LINK]; whatever precedes the first slash of a routing id of another form."""
    return routing_id.split(b"/", 1)[0].decode("ascii", errors="replace")


class Gate:
    """Checks the messages of one listening socket with keys."""

    def __init__(self, allowed: AllowList) -> None:
        self._allowed = allowed

    def misuse(self, routing_id: bytes, frame: zmq.Frame) -> Misuse | None:
        """None if `frame` may come from `routing_id`."""
        key = cast(str, frame.get(USER_ID))
        owner = self._allowed.name_of(key)
        if owner is None:
            return Misuse(f"key {key[:8]}", "its key was revoked, or is refused for a while")
        if owner != name_in(routing_id):
            return Misuse(owner, f"its key does not let it speak as {name_in(routing_id)[:64]!r}")
        return None

    def ban(self, name: str) -> None:
        """Refuse the key of `name` for a while: on the connections that it has, and to new ones."""
        self._allowed.ban(name, BAN_SECONDS)
