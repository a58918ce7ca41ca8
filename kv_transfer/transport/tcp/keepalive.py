"""Keeps firewalls and address translators on the path from dropping idle connections."""

from __future__ import annotations

import socket
from typing import Final

# Seconds. Firewalls drop a connection silently after it was idle for a minute or more. The next transfer would then
# wait for its stall_timeout, and fail.
IDLE_SECONDS: Final = 30
_OPTIONS: Final = (
    (socket.TCP_KEEPIDLE, IDLE_SECONDS),
    (socket.TCP_KEEPINTVL, 5),
    (socket.TCP_KEEPCNT, 3),
)


def keep_alive(sock: socket.socket) -> None:
    """Let the kernel probe the peer of a connection that has been idle for IDLE_SECONDS."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _OPTIONS:
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
