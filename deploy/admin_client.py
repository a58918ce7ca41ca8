"""HTTP client for the admin socket of the router on this host. It needs no API key and checks no certificate."""

from __future__ import annotations

import http.client
import os
import socket
from pathlib import Path

MAX_ANSWER_BYTES = 64 << 20


class _SocketConnection(http.client.HTTPConnection):
    def __init__(self, path: Path, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        try:
            self.sock.connect(os.fspath(self._path))
        except OSError:
            self.sock.close()
            raise


def ask(
    path: Path,
    method: str,
    target: str,
    body: bytes | None = None,
    headers: dict[str, str] | None = None,
    *,
    timeout: float,
) -> tuple[int, bytes]:
    """Send a request; return (status, body). Raises OSError or HTTPException if the router does not answer."""
    connection = _SocketConnection(path, timeout)
    try:
        connection.request(method, target, body, headers or {})
        response = connection.getresponse()
        return response.status, response.read(MAX_ANSWER_BYTES)
    finally:
        connection.close()
