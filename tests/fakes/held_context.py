"""A ZMQ context that closes the sockets which a test has forgotten."""

from __future__ import annotations

from typing import Any

import zmq


class Context(zmq.Context[zmq.Socket[bytes]]):
    """Holds on to its sockets until it is destroyed: one that is only forgotten is a ResourceWarning."""

    def socket(self, *arguments: Any, **options: Any) -> zmq.Socket[bytes]:
        made = super().socket(*arguments, **options)
        self.__dict__.setdefault("made", []).append(made)
        return made
