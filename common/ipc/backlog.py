"""Bytes that a socket has not sent yet, by peer: ZMQ bounds how many messages wait, and not how large they are."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import zmq

LARGE = (
    16 << 10
)  # smaller messages are bounded by their number alone, and copied, which costs less than watching them


@dataclass(slots=True)
class _Waiting:
    messages: deque[tuple[zmq.MessageTracker, int]] = field(default_factory=deque)  # in order
    nbytes: int = 0

    def forget_sent(self) -> None:
        while self.messages and self.messages[0][0].done:
            self.nbytes -= self.messages.popleft()[1]


class Backlog:
    """Messages of `LARGE` and more bytes. Single-threaded, as its socket is."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._peers: dict[bytes, _Waiting] = {}  # those for whom something waits

    def admits(self, peer: bytes, nbytes: int) -> bool:
        """Whether so many bytes may wait for `peer` beside what does; a message for which nothing waits may always."""
        for waiting in self._peers.values():
            waiting.forget_sent()
        self._peers = {name: waiting for name, waiting in self._peers.items() if waiting.messages}
        return peer not in self._peers or self._peers[peer].nbytes + nbytes <= self._limit

    def add(self, peer: bytes, tracker: zmq.MessageTracker, nbytes: int) -> None:
        """`tracker` is done when ZMQ has sent the message, or dropped it with its peer."""
        waiting = self._peers.setdefault(peer, _Waiting())
        waiting.messages.append((tracker, nbytes))
        waiting.nbytes += nbytes
