"""Keys of the links between processes: CURVE on every socket, and an allow-list of the cluster's public keys.

A keys directory (made by `deploy/keygen`) holds NAME.key (public) of every process and NAME.key_secret of those that
run on this host. Without keys, sockets bind to loopback only (check_bind).
"""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Protocol

import zmq
import zmq.auth
from zmq.auth.thread import ThreadAuthenticator

from common.errors import ConfigError

KEY = "security.keys"
ZAP_DOMAIN = "tandem"


class LinkSecurity(Protocol):
    """Applied to a socket before it binds or connects."""

    @property
    def open_binds(self) -> bool:
        """Whether sockets may bind to addresses that other hosts reach."""
        ...

    def secure_server(self, socket: zmq.Socket[bytes]) -> None: ...
    def secure_client(self, socket: zmq.Socket[bytes], server: str) -> None: ...
    def close(self) -> None: ...


class LoopbackOnly:
    """No keys: everything stays on this host."""

    open_binds = False

    def secure_server(self, socket: zmq.Socket[bytes]) -> None:
        pass

    def secure_client(self, socket: zmq.Socket[bytes], server: str) -> None:
        pass

    def close(self) -> None:
        pass


class Curve:
    """One process's key pair and the public keys that it talks to."""

    open_binds = True

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], directory: Path, name: str) -> None:
        """Raises ConfigError naming the missing or readable file."""
        self._directory = directory
        secret_file = directory / f"{name}.key_secret"
        if not secret_file.is_file():
            raise ConfigError(
                KEY, f"{secret_file} is missing; make it with deploy/keygen and copy it to this host"
            )
        if stat.S_IMODE(secret_file.stat().st_mode) & 0o077:
            raise ConfigError(KEY, f"{secret_file} can be read by others; chmod 600 it")
        self._public, secret = _load(secret_file)
        if secret is None:
            raise ConfigError(KEY, f"{secret_file} is not a key file: it has no secret key")
        self._secret = secret
        self._authenticator = ThreadAuthenticator(
            context
        )  # answers ZAP: only keys in the directory are let in
        self._authenticator.start()
        self._authenticator.configure_curve(domain=ZAP_DOMAIN, location=str(directory))

    def secure_server(self, socket: zmq.Socket[bytes]) -> None:
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self._public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._secret)
        socket.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN.encode())

    def secure_client(self, socket: zmq.Socket[bytes], server: str) -> None:
        """`server` is the name of the process at the other end: its key is pinned."""
        public_file = self._directory / f"{server}.key"
        if not public_file.is_file():
            raise ConfigError(KEY, f"{public_file} is missing; copy the public key of {server} to this host")
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self._public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._secret)
        socket.setsockopt(zmq.CURVE_SERVERKEY, _load(public_file)[0])

    def close(self) -> None:
        self._authenticator.stop()


def _load(file: Path) -> tuple[bytes, bytes | None]:
    try:
        return zmq.auth.load_certificate(file)
    except (OSError, ValueError) as error:
        raise ConfigError(KEY, f"{file} is not a key file: {error}") from error


def link_security(context: zmq.Context[zmq.Socket[bytes]], keys: Path | None, name: str) -> LinkSecurity:
    """Chosen once per process."""
    return LoopbackOnly() if keys is None else Curve(context, keys, name)
