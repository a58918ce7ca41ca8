"""Refuses the start of a cluster whose ports are in use, and names who uses them.

Without this check two clusters of one user that both have several router processes would share a port, and the kernel
would give each of them some of the connections.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from common.config import Resolved
from common.config.admin_listener import admin_listeners
from common.config.kv_events import event_addresses
from common.config.router_processes import CONTROL
from common.config.run_directory import control_addresses
from common.errors import ConfigError
from common.node_names import OWN
from deploy.cluster_options import down_line
from deploy.running_processes import PROC, RunningProcess, read_process

LISTENING = "0A"  # state of a socket in /proc/net/tcp
LEAVE_SECONDS = 5.0  # for which a process that is about to end may still have a port
POLL_SECONDS = 0.1
ROUTER_PORT = "router.port"
KV_EVENTS = ("first_port", "first_replay_port")
_TCP = "tcp://"
Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class _Place(NamedTuple):
    """An address at which a process of the cluster will listen."""

    key: str  # of the cluster file
    host: str
    port: int


def check_ports(resolved: Resolved, stopped: Callable[[], bool]) -> None:
    """Raise ConfigError for a port of the cluster that is in use.

    A port of another cluster is refused at once. Other processes get LEAVE_SECONDS to end, unless `stopped`.
    """
    places = list(_places(resolved))
    deadline = time.monotonic() + LEAVE_SECONDS
    while taken := next(((place, inodes) for place in places if (inodes := _listeners(place))), None):
        place, inodes = taken
        user = _user_of(inodes)
        late = time.monotonic() > deadline or stopped()
        if late or (user is not None and user.cluster):
            raise ConfigError(place.key, _refusal(place, user))
        time.sleep(POLL_SECONDS)


def _refusal(place: _Place, user: RunningProcess | None) -> str:
    another = "choose another one" + (" with --port" if place.key == ROUTER_PORT else "")
    if user is None:
        return f"port {place.port} is in use by a process of another user; {another}"
    if user.cluster:
        return (
            f"port {place.port} is in use by the cluster of {user.cluster} (pid {user.pid}); {another}, or stop that "
            f"cluster with {down_line(user.cluster, user.overrides)}"
        )
    return f"port {place.port} is in use by process {user.pid} ({user.command[0]}); {another}, or end it"


def _places(resolved: Resolved) -> Iterator[_Place]:
    """Return where the processes of the cluster will listen, as far as the file fixes the ports."""
    cluster = resolved.cluster
    yield _Place(ROUTER_PORT, cluster.router.host, cluster.router.port)
    admin = admin_listeners(resolved).address
    if admin is not None:
        yield _Place("router.admin", *admin)
    addresses = [(CONTROL, each) for each in control_addresses(resolved)]
    addresses += [
        (f"prefill.nodes[{each.name}].peer_address", each.peer_address) for each in cluster.prefill.nodes
    ]
    addresses += [
        (f"kv_events.{key}", address)
        for role, nodes in (("prefill", cluster.prefill.nodes), ("decode", cluster.decode.nodes))
        for each in (nodes if cluster.kv_events.enabled else ())
        for key, address in zip(KV_EVENTS, event_addresses(cluster, role, each.name), strict=True)
    ]
    for key, address in addresses:
        if address.startswith(_TCP):
            host, _, port = address.removeprefix(_TCP).rpartition(":")
            yield _Place(key, cluster.process.address or "" if host == OWN else host.strip("[]"), int(port))


def _listeners(place: _Place) -> set[str]:
    """Return the inodes of the sockets that listen on a port at one of the addresses of its host."""
    if not place.port:
        return set()
    own = _addresses(place.host)
    found = set()
    for table in ("tcp", "tcp6"):
        for line in _lines(PROC / "net" / table):
            fields = line.split()
            address, _, port = fields[1].partition(":")
            if fields[3] != LISTENING or int(port, 16) != place.port:
                continue
            theirs = _decoded(address)
            if any(_meet(each, theirs) for each in own):
                found.add(fields[9])
    return found


def _meet(one: Address, other: Address) -> bool:
    """Return whether one port cannot be bound at both. That a socket of IPv6 may exclude IPv4 is not seen here."""
    return one.version == other.version and (one == other or one.is_unspecified or other.is_unspecified)


def _lines(table: Path) -> list[str]:
    """Return the rows of a table of sockets; none if this kernel lacks the protocol."""
    try:
        return table.read_text().splitlines()[1:]
    except OSError:
        return []


def _addresses(host: str) -> set[Address]:
    try:
        found = socket.getaddrinfo(host or None, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError):
        # The process that binds to it reports that.
        return set()
    return {ipaddress.ip_address(str(address[0]).partition("%")[0]) for *_, address in found}


def _decoded(address: str) -> Address:
    """Return an address that the kernel wrote: words of four bytes in the order of this host, in hexadecimal."""
    words = [int(address[at : at + 8], 16) for at in range(0, len(address), 8)]
    found = ipaddress.ip_address(b"".join(word.to_bytes(4, sys.byteorder) for word in words))
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return mapped or found


def _user_of(inodes: set[str]) -> RunningProcess | None:
    """Return a process of this user that has one of these sockets, one of a cluster if there is one."""
    links = {f"socket:[{inode}]" for inode in inodes}
    users = []
    for process in PROC.iterdir():
        if process.name.isdigit() and links & _open_files(process):
            with contextlib.suppress(OSError):
                users.append(read_process(int(process.name)))
    return min(users, key=lambda user: (not user.cluster, user.pid), default=None)


def _open_files(process: Path) -> set[str]:
    """Return what the descriptors of a process refer to; nothing for those of other users."""
    found = set()
    with contextlib.suppress(OSError):
        for each in (process / "fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # it has just been closed
                found.add(str(each.readlink()))
    return found
