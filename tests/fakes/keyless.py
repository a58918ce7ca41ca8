"""Sockets over TCP without keys, for tests of what is not security: no process is built like that."""

from __future__ import annotations

import zmq

from common.ipc.curve import Plain
from common.ipc.gate import Gate


class Keyless(Plain):
    """Binds and connects anywhere, and believes everybody."""

    open_binds = True

    def secure_server(self, socket: zmq.Socket[bytes], address: str) -> Gate | None:
        return None

    def secure_client(self, socket: zmq.Socket[bytes], address: str, server: str) -> None:
        pass
