"""Finds the IP addresses of a host by its name; those of peers in a thread of its own.

libzmq looks names up in its I/O thread: while a DNS server does not answer, every connection of the process would stand
still. Besides, it finds either IPv4 or IPv6 addresses. A name gives an address and no trust: whoever listens there must
prove its key.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from common.tcp_address import tcp_address

MAX_ADDRESSES = 64  # of one name; further ones are not used

Resolve = Callable[[str], Sequence[str]]  # name -> IP addresses; raises OSError


class Host(Protocol):
    """Gives the addresses at which a peer may be dialled. Used by the thread of one socket."""

    @property
    def text(self) -> str:
        """The configured address, for the choice of its security and for errors."""
        ...

    def ask(self) -> None:
        """Look for the peer again: no dial has led to it."""
        ...

    def next(self) -> str | None:
        """Return the address to dial now; None if none is known."""
        ...

    @property
    def problem(self) -> str:
        """The reason for which no address is known, if none is."""
        ...


def resolve(name: str) -> list[str]:
    """Return the addresses of a host, without repetitions. Raises OSError."""
    found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def listening_host(name: str) -> str:
    """Return the address at which this host, which has this name, listens. Raises OSError or UnicodeError.

    That is its first IPv4 address, or its first IPv6 address if it has no other.
    """
    found = resolve(name)
    return next((each for each in found if ":" not in each), found[0])


def listening_address(address: str) -> str:
    """Return the ZMQ address to which a socket of this host binds: that of its IP address for tcp://NAME:PORT."""
    name = _name_of(address)
    if name is None or name == "*":
        return address
    try:
        return tcp_address(listening_host(name), address.rpartition(":")[2])
    except (OSError, UnicodeError):
        # The name may be that of a network interface, which libzmq knows.
        return address


def not_found(name: str, error: OSError | UnicodeError) -> str:
    """Say that a name was not found and why."""
    return f"the addresses of {name} are not found: {error}"


class FixedHost:
    """The address of a peer that needs no lookup: an IP address, this host, a path."""

    def __init__(self, address: str) -> None:
        self.text = address
        self.problem = ""

    def ask(self) -> None:
        pass

    def next(self) -> str | None:
        return self.text


class HostLookup:
    """The addresses of tcp://NAME:PORT. Used by the thread of one socket; at most one lookup runs at a time."""

    def __init__(self, name: str, port: str, resolve: Resolve = resolve) -> None:
        self.text = f"tcp://{name}:{port}"
        self._name = name
        self._port = port
        self._resolve = resolve
        # Written by the thread of a lookup.
        self._found: tuple[str, ...] = ()
        self.problem = f"the addresses of {name} are not known yet"
        self._latest: str | None = None
        self._thread: threading.Thread | None = None
        self.ask()

    def ask(self) -> None:
        """Look the name up again, unless that is being done. If it is not found, its earlier addresses stay."""
        if self._thread is None or not self._thread.is_alive():
            # A daemon, since a process must not wait for a DNS server when it ends.
            self._thread = threading.Thread(target=self._look_up, name="host-lookup", daemon=True)
            # Too many threads: the next dial asks again.
            with contextlib.suppress(RuntimeError):
                self._thread.start()

    def next(self) -> str | None:
        """Return the address to dial now, each time another one of several; None if none is known yet."""
        found = self._found
        if not found:
            return None
        at = found.index(self._latest) + 1 if self._latest in found else 0
        self._latest = found[at % len(found)]
        return tcp_address(self._latest, self._port)

    def _look_up(self) -> None:
        try:
            found = tuple(self._resolve(self._name)[:MAX_ADDRESSES])
        except (OSError, UnicodeError) as error:
            self.problem = not_found(self._name, error)
            return
        if found:
            self._found = found


def host_of(address: str) -> Host:
    """Return what gives the addresses to dial for `address`."""
    name = _name_of(address)
    return FixedHost(address) if name is None else HostLookup(name, address.rpartition(":")[2])


def listener_of(address: str) -> Host:
    """Return what gives the address at which the host of `address` listens: see `listening_host`."""
    name = _name_of(address)
    if name is None:
        return FixedHost(address)
    return HostLookup(name, address.rpartition(":")[2], lambda name: [listening_host(name)])


def _name_of(address: str) -> str | None:
    """Return the name that has to be looked up for a ZMQ address; None if there is none."""
    if not address.startswith("tcp://"):
        return None
    host = address.removeprefix("tcp://").rpartition(":")[0]
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return None if host == "localhost" else host
    return None
