"""TCP sockets without keys, for tests that are not about security. Real processes are never built like this."""

from __future__ import annotations

import zmq

from common.ipc.curve import Plain
from common.ipc.identity_check import IdentityCheck


class Keyless(Plain):
    """Binds and connects anywhere, and trusts everybody."""

    open_binds = True

    def secure_server(self, socket: zmq.Socket[bytes], address: str) -> IdentityCheck | None:
        return None

    def secure_client(self, socket: zmq.Socket[bytes], address: str, server: str) -> None:
        pass
