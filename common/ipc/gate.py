"""Whether a message may say what its routing id claims: the key of its connection must belong to that NAME."""

from __future__ import annotations

from typing import cast

import zmq

from common.ipc.allow_list import AllowList
from common.observability.bounded_log import BoundedLog

USER_ID = "User-Id"  # set by the ZAP handler: the public key


def name_in(routing_id: bytes) -> str:
    """NAME of NAME/INCARNATION[/LINK]; whatever precedes the first slash of a routing id of another form."""
    return routing_id.split(b"/", 1)[0].decode("ascii", errors="replace")


class Gate:
    """Of one listening socket with keys."""

    def __init__(self, allowed: AllowList, refusals: BoundedLog) -> None:
        self._allowed = allowed
        self._refusals = refusals
        self.refused = 0

    def owner(self, frame: zmq.Frame) -> str:
        """Name of the key that this frame's connection has proved; "" for a key that was revoked."""
        return self._allowed.name_of(cast(str, frame.get(USER_ID))) or ""

    def admits(self, routing_id: bytes, frame: zmq.Frame) -> bool:
        """Whether `frame` may come from `routing_id`. A refusal is counted and logged."""
        owner = self.owner(frame)
        if owner and owner == name_in(routing_id):
            return True
        self.refused += 1
        if owner:
            self._refusals.warning(owner, f"its key does not let it speak as {name_in(routing_id)[:64]!r}")
        else:
            self._refusals.warning(name_in(routing_id)[:64], "its key was revoked, or is refused for a while")
        return False
