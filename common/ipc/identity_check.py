"""Checks that the key of a connection belongs to the NAME that a message's routing id claims."""

from __future__ import annotations

from typing import NamedTuple, cast

import zmq

from common.ipc.allow_list import AllowList
from common.messages.identity import name_in

USER_ID = "User-Id"  # set by the ZAP handler: the public key
BAN_SECONDS = 10.0  # for which the key of a peer that was cut off is refused


class Misuse(NamedTuple):
    """A frame that its connection's key does not allow."""

    culprit: str  # NAME of the key, or the beginning of a key that belongs to nobody
    reason: str


class IdentityCheck:
    """Checks the messages of one listening socket with keys."""

    def __init__(self, allowed: AllowList) -> None:
        self._allowed = allowed

    def misuse(self, routing_id: bytes, frame: zmq.Frame) -> Misuse | None:
        """Return None if `frame` may come from `routing_id`, else the misuse."""
        key = cast(str, frame.get(USER_ID))
        owner = self._allowed.name_of(key)
        if owner is None:
            return Misuse(f"key {key[:8]}", "its key was revoked or is temporarily refused")
        if owner != name_in(routing_id):
            return Misuse(owner, f"its key does not let it speak as {name_in(routing_id)[:64]!r}")
        return None

    def ban(self, name: str) -> None:
        """Refuse the key of `name` for BAN_SECONDS, on its connections and on new ones."""
        self._allowed.ban(name, BAN_SECONDS)
