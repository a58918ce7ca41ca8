"""The sending end of a rank's transfers, and its sockets."""

from __future__ import annotations

from dataclasses import dataclass

import zmq

from common.ipc import LinkSecurity, RouterSocket
from kv_transfer.sender import Sender


@dataclass(frozen=True, slots=True)
class Sockets:
    """The sockets of a rank, which are opened before its model is loaded."""

    context: zmq.Context[zmq.Socket[bytes]]
    security: LinkSecurity
    address: str  # to which the peer socket binds

    def close(self) -> None:
        self.security.close()
        self.context.term()


@dataclass(frozen=True, slots=True)
class SendingEnd:
    """The parts with which a rank sends pages of its own pool."""

    peers: RouterSocket
    sender: Sender
