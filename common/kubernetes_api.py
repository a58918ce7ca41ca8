"""Reaches the API server of Kubernetes with the credentials of the pod's service account."""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping
from pathlib import Path

import aiohttp

from common.errors import ConfigError

CREDENTIALS = Path("/var/run/secrets/kubernetes.io/serviceaccount")  # with token, namespace and ca.crt


class ApiServer:
    """Knows the address of the API server and reads the credentials again each time, because tokens rotate."""

    def __init__(
        self,
        server: str | None = None,
        credentials: Path = CREDENTIALS,
        environ: Mapping[str, str] = os.environ,
        *,
        keys: tuple[str, str] = ("kubernetes.server", "kubernetes.credentials"),
    ) -> None:
        """`server` is a URL; None: that of the pod's cluster. Errors name `keys`. Raises ConfigError."""
        self._key = keys[1]
        self._credentials = credentials
        self.url = server or _server(environ, keys[0])

    def read(self, name: str) -> str:
        """Return the text of a file of the service account. Raises ConfigError."""
        file = self._credentials / name
        try:
            return file.read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise ConfigError(
                self._key, f"cannot read {file}: {reason}; the pod needs a service account token"
            ) from error

    def headers(self) -> dict[str, str]:
        """Return the headers of one request. Raises ConfigError."""
        return {"Authorization": f"Bearer {self.read('token')}", "Accept": "application/json"}

    def tls(self) -> ssl.SSLContext | bool:
        """Return what checks the server's certificate. Raises ConfigError."""
        if not self.url.startswith("https://"):
            return True
        try:
            return ssl.create_default_context(cafile=self._credentials / "ca.crt")
        except OSError as error:
            raise ConfigError(self._key, f"cannot read ca.crt: {error}") from error


async def read_body(response: aiohttp.ClientResponse, most: int) -> bytes:
    """Return the whole body. Raises OSError if it has more than `most` bytes."""
    body = bytearray()
    async for piece in response.content.iter_any():
        body += piece
        if len(body) > most:
            raise OSError(f"{response.url} has more than {most} bytes")
    return bytes(body)


def _server(environ: Mapping[str, str], key: str) -> str:
    host, port = environ.get("KUBERNETES_SERVICE_HOST"), environ.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        raise ConfigError(
            key, "this is not a pod of Kubernetes (KUBERNETES_SERVICE_HOST is not set): write another address"
        )
    return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
