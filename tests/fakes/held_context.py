"""A ZMQ context that closes sockets which a test has forgotten."""

from __future__ import annotations

from typing import Any

import zmq


class Context(zmq.Context[zmq.Socket[bytes]]):
    """Keeps its sockets until it is destroyed, because a forgotten socket raises a ResourceWarning."""

    @property
    def made(self) -> list[zmq.Socket[bytes]]:
        held: list[zmq.Socket[bytes]] = self.__dict__.setdefault("held", [])
        return held

    def socket(self, *arguments: Any, **options: Any) -> zmq.Socket[bytes]:
        made = super().socket(*arguments, **options)
        self.made.append(made)
        return made
