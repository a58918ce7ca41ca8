"""The sockets of HTTP listeners: TLS, the admin socket, and the address of a peer."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import stat
from pathlib import Path

from common.errors import ConfigError
from router.http.client import client_address

BACKLOG = 1024


class TlsFiles:
    """An SSL context that can reload its files while it serves."""

    def __init__(self, cert: Path, key: Path, client_ca: Path | None) -> None:
        """Read the files. Raises ConfigError with the config key of an unusable file."""
        self._cert, self._key, self._client_ca = cert, key, client_ca
        self.context = self._current = self._read()
        self.context.sni_callback = self._switch  # OpenSSL also calls it for clients that send no name

    def load(self) -> None:
        """Reload the files for new connections. Raises ConfigError; then the previous files stay in use."""
        self._current = self._read()

    def _switch(self, connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        """Use a new context for each reload: one that is loaded twice keeps old authorities, and half of a pair."""
        connection.context = self._current

    def _read(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        for name, path in (("cert", self._cert), ("key", self._key), ("client_ca", self._client_ca)):
            try:
                mode = path.stat().st_mode if path is not None else 0
            except OSError as error:
                raise ConfigError(f"router.tls.{name}", f"cannot read {path}: {error.strerror}") from error
            if name == "key" and mode & 0o007:
                raise ConfigError("router.tls.key", f"{path} is open to all users of this host; chmod 600 it")
        try:
            context.load_cert_chain(self._cert, self._key, password=_no_password)
        except (OSError, ValueError) as error:
            raise ConfigError(
                "router.tls.cert",
                f"{self._cert} and {self._key} are not a PEM certificate and its key: {error}",
            ) from error
        if self._client_ca is not None:
            try:
                context.load_verify_locations(self._client_ca)
            except (OSError, ValueError) as error:
                raise ConfigError(
                    "router.tls.client_ca", f"{self._client_ca} is not a PEM certificate: {error}"
                ) from error
            context.verify_mode = ssl.CERT_REQUIRED
        return context


def _no_password() -> str:
    raise ValueError("the private key is encrypted; write it without a passphrase")


def owner_socket(path: Path) -> socket.socket:
    """Bind a Unix socket with mode 0600. Raises ConfigError if that fails, as for a path that a listener has."""
    key = "router.admin"
    try:
        if stat.S_ISSOCK(path.lstat().st_mode):
            with socket.socket(socket.AF_UNIX) as probe:
                probe.settimeout(1.0)
                if probe.connect_ex(os.fspath(path)) == 0:
                    raise ConfigError(
                        key, f"another router listens at {path}; stop it, or choose another path"
                    )
            path.unlink()  # left by a router that was killed
        else:
            raise ConfigError(key, f"{path} exists and is not a socket; remove it, or choose another path")
    except FileNotFoundError:
        pass
    except OSError as error:
        raise ConfigError(key, f"cannot listen at {path}: {error.strerror}") from error
    made = socket.socket(socket.AF_UNIX)
    before = os.umask(0o177)
    try:
        made.bind(os.fspath(path))
    except OSError as error:
        made.close()
        raise ConfigError(key, f"cannot listen at {path}: {error.strerror}") from error
    finally:
        os.umask(before)
    made.setblocking(False)
    return made


def peer_of(transport: asyncio.BaseTransport | None) -> str | None:
    """Return the address of the peer; None on a Unix socket, which has none."""
    peer = transport.get_extra_info("peername") if transport is not None else None
    return client_address(str(peer[0])) if isinstance(peer, tuple) else None
