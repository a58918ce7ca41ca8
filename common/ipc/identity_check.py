"""Checks that the key of a connection belongs to the NAME that a message's routing id claims, or to its pattern."""

from __future__ import annotations

from typing import NamedTuple, cast

import zmq

from common.ipc.allow_list import AllowList
from common.ipc.bad_frames import peer_of, printable
from common.messages.identity import name_in
from common.node_names import NodeNames, is_pattern

USER_ID = "User-Id"  # set by the ZAP handler: the public key
BAN_SECONDS = 10.0  # for which the key of a peer that was cut off is refused


class Misuse(NamedTuple):
    """A frame that its connection's key does not allow."""

    # NAME of the key, PATTERN/ROUTING-ID for the key of a pattern, or the beginning of a key that belongs to nobody.
    culprit: str
    reason: str


class IdentityCheck:
    """Checks the messages of one listening socket with keys."""

    def __init__(self, allowed: AllowList, names: NodeNames) -> None:
        self._allowed = allowed
        self._names = names

    def misuse(self, routing_id: bytes, frame: zmq.Frame) -> Misuse | None:
        """Return None if `frame` may come from `routing_id`, else the misuse."""
        key = cast(str, frame.get(USER_ID))
        owner = self._allowed.name_of(key)
        if owner is None:
            return Misuse(f"key {key[:8]}", "its key was revoked or is temporarily refused")
        name = name_in(routing_id)
        if is_pattern(name) or owner != self._names.key_of(name):
            culprit = f"{owner}/{printable(routing_id)}" if self._names.shares_key(owner) else owner
            return Misuse(culprit, f"its key does not let it speak as {name[:64]!r}")
        return None

    def culprit(self, routing_id: bytes) -> str:
        """Return who is to blame for a bad frame of `routing_id`, for which its key may speak: a process or a link.

        The key of a pattern does not prove which of its nodes speaks: only the link is to blame then.
        """
        return printable(routing_id) if self._names.shares_key(name_in(routing_id)) else peer_of(routing_id)

    def ban(self, name: str) -> None:
        """Refuse the key of `name` for BAN_SECONDS, on all its connections, unless other nodes have it too."""
        if not self._names.shares_key(name):
            self._allowed.ban(name, BAN_SECONDS)
