"""A listening socket of a process that has run out of descriptors."""

from __future__ import annotations

import errno
import os
import socket
from typing import Any


class ExhaustedListener(socket.socket):
    """Listens on a free port of the loopback address; `accept` fails while `exhausted`, and counts that."""

    def __init__(self) -> None:
        super().__init__()
        self.exhausted = True
        self.refused = 0
        self.bind(("127.0.0.1", 0))
        self.listen()

    def accept(self) -> tuple[socket.socket, Any]:
        if self.exhausted:
            self.refused += 1
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return super().accept()
