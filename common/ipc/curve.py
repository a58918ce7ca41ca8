"""Security of the links between processes: every tcp:// socket uses CURVE, and a key is valid for one name or pattern.

There are three kinds, chosen once per process (from_config.py):

    Curve          keys from security.keys, on every socket
    PerRunCurve    no keys are configured: keys of this run on tcp:// sockets, plain ipc:// sockets of mode 0600
    Plain          no keys: ipc:// and inproc:// only
"""

from __future__ import annotations

import ipaddress
import stat
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

import zmq
import zmq.auth

from common.errors import ConfigError
from common.ipc.allow_list import AllowList
from common.ipc.identity_check import IdentityCheck
from common.ipc.key_files import public_file, secret_file
from common.ipc.zap import DOMAIN, ZapHandler
from common.node_names import NO_NAMES, NodeNames
from common.observability.bounded_log import BoundedLog
from common.observability.logs import Log
from common.tcp_address import tcp_host

KEY = "security.keys"


class LinkSecurity(Protocol):
    """Security settings, applied to a socket before it binds or connects."""

    @property
    def open_binds(self) -> bool:
        """True if sockets may bind to addresses that other hosts can reach."""
        ...

    def secure_server(self, socket: zmq.Socket[bytes], address: str) -> IdentityCheck | None:
        """Configure a listening socket and return the check of its messages; None for a plain socket."""
        ...

    def secure_client(self, socket: zmq.Socket[bytes], address: str, server: str) -> None:
        """Configure a connecting socket. `server` is the process at `address`, whose key is pinned."""
        ...

    def close(self) -> None: ...


class Plain:
    """No keys: file permissions and process boundaries protect the sockets."""

    open_binds = False

    def secure_server(self, socket: zmq.Socket[bytes], address: str) -> IdentityCheck | None:
        self._refuse_tcp(address)
        return None

    def secure_client(self, socket: zmq.Socket[bytes], address: str, server: str) -> None:
        self._refuse_tcp(address)

    def close(self) -> None:
        pass

    @staticmethod
    def _refuse_tcp(address: str) -> None:
        if is_tcp(address):
            raise ConfigError(KEY, f"{address} can be reached by every user of this host: it needs keys")


class Curve:
    """One process's key pair, and the public keys of the processes that it connects to."""

    open_binds = True

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        directory: Path,
        name: str,
        admitted: Iterable[str],
        clock: Callable[[], float] = time.monotonic,
        names: NodeNames = NO_NAMES,
    ) -> None:
        """`admitted` are the names and patterns whose keys may connect; `names` says which names have a pattern's key.

        Raises ConfigError with the file that is missing or readable by others.
        """
        self._directory = directory
        self._names = names
        file = secret_file(directory, names.key_of(name))
        if not file.is_file():
            raise ConfigError(KEY, f"{file} is missing; make it with deploy/keygen and copy it to this host")
        if stat.S_IMODE(file.stat().st_mode) & 0o077:
            raise ConfigError(KEY, f"{file} can be read by others; run chmod 600 on it")
        self._public, secret = _load(file)
        if secret is None:
            raise ConfigError(KEY, f"{file} is not a key file: it has no secret key")
        self._secret = secret
        self.allowed = AllowList(directory, admitted, clock)
        self._zap = ZapHandler(context, self.allowed, BoundedLog(Log("links"), "refused a connection"))

    def secure_server(self, socket: zmq.Socket[bytes], address: str) -> IdentityCheck | None:
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self._public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._secret)
        socket.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
        return IdentityCheck(self.allowed, self._names)

    def secure_client(self, socket: zmq.Socket[bytes], address: str, server: str) -> None:
        file = public_file(self._directory, self._names.key_of(server))
        if not file.is_file():
            raise ConfigError(KEY, f"{file} is missing; copy the public key of {server} to this host")
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self._public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._secret)
        socket.setsockopt(zmq.CURVE_SERVERKEY, _load(file)[0])

    def close(self) -> None:
        self._zap.close()


class PerRunCurve:
    """Keys that processes of one user and host share through the run directory; made for the first tcp:// socket.

    They keep other users of the host out of loopback TCP. Other hosts cannot get these keys, so sockets that other
    hosts could reach stay refused.
    """

    open_binds = False

    def __init__(self, make: Callable[[], Curve]) -> None:
        self._make = make
        self._curve: Curve | None = None

    def secure_server(self, socket: zmq.Socket[bytes], address: str) -> IdentityCheck | None:
        return self._made().secure_server(socket, address) if is_tcp(address) else None

    def secure_client(self, socket: zmq.Socket[bytes], address: str, server: str) -> None:
        if not is_tcp(address):
            return
        if not is_loopback(address):
            raise ConfigError(
                KEY,
                f"{address} is on another host, and the cluster has no keys: make some with deploy/keygen and name "
                "their directory in security.keys",
            )
        self._made().secure_client(socket, address, server)

    def close(self) -> None:
        if self._curve is not None:
            self._curve.close()

    def _made(self) -> Curve:
        if self._curve is None:
            self._curve = self._make()
        return self._curve


def is_tcp(address: str) -> bool:
    """Return whether other users or hosts may reach the address: true for anything but ipc and inproc."""
    return not address.startswith(("ipc://", "inproc://"))


def is_ipv6(address: str) -> bool:
    """Return whether the address contains an IPv6 address, for which a ZMQ socket has to be prepared."""
    return "[" in address and is_tcp(address)


def is_loopback(address: str) -> bool:
    """Return whether a tcp:// address is a loopback one; False for a name other than localhost."""
    host = tcp_host(address)
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _load(file: Path) -> tuple[bytes, bytes | None]:
    try:
        return zmq.auth.load_certificate(file)
    except (OSError, ValueError) as error:
        raise ConfigError(KEY, f"{file} is not a key file: {error}") from error
