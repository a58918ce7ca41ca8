"""Opens the socket at which a decode node listens for prefill nodes."""

from __future__ import annotations

import socket

BACKLOG = 128


def listening_socket(host: str, port: int) -> socket.socket:
    """Return a socket that does not block and listens at an address, or at the IPv4 address of a name. Raises OSError.

    `port`: 0 for any.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
    listener.setblocking(False)
    return listener
