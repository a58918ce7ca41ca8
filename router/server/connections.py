"""Bounds the number of open HTTP connections, per client and in total."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Protocol

# Descriptors of a router for everything else: its links to nodes, its workers, sockets and files.
RESERVED, RESERVED_PER_NODE = 128, 4
MIN_CONNECTIONS = 16  # connections that it has however few descriptors there are

Refused = Callable[[str, str], None]  # client, reason


class Connection(Protocol):
    """An open connection."""

    def drop(self) -> None:
        """Close it at once."""


class ConnectionLimit:
    """Counts open connections. When there are too many, the one that has been idle the longest is dropped.

    So clients that connect and send nothing, or never complete the head of a request, cannot keep others out.
    """

    def __init__(self, per_client: int, total: int, refused: Refused = lambda client, reason: None) -> None:
        """`refused` is called for each new connection that must be closed."""
        self._per_client = per_client
        self.total = total
        self._refused = refused
        self._clients: dict[Connection, str] = {}
        self._open: Counter[str] = Counter()
        self._idle: dict[Connection, None] = {}  # the longest idle first

    def __len__(self) -> int:
        return len(self._clients)

    @property
    def idle_connections(self) -> int:
        """Number of connections without a request in progress."""
        return len(self._idle)

    def has_room(self, client: str, pending: int) -> bool:
        """Return whether the client may have another connection besides `pending` ones that are not counted yet.

        If not, its new connection must be closed, and `refused` is called.
        """
        if self._open[client] + pending < self._per_client:
            return True
        self._refused(
            client, f"it has {self._per_client} connections, which is router.max_connections_per_client"
        )
        return False

    def opened(self, client: str, connection: Connection) -> bool:
        """Count a connection, which is idle. Return False if it must be closed; then it is not counted."""
        if not self.has_room(client, 0):
            return False
        if len(self._clients) >= self.total:
            idle = next(iter(self._idle), None)
            if idle is None:
                self._refused(client, f"{self.total} connections have a request, and there may be no more")
                return False
            # Its end is announced later: it no longer counts.
            self.closed(idle)
            idle.drop()
        self._clients[connection] = client
        self._open[client] += 1
        self._idle[connection] = None
        return True

    def closed(self, connection: Connection) -> None:
        """Forget a connection. May be called repeatedly."""
        self._idle.pop(connection, None)
        client = self._clients.pop(connection, None)
        if client is not None:
            self._open[client] -= 1
            if not self._open[client]:
                del self._open[client]

    def busy(self, connection: Connection) -> None:
        """Note that a request has begun on the connection."""
        self._idle.pop(connection, None)

    def idle(self, connection: Connection) -> None:
        """Note that the request has been answered."""
        if connection in self._clients:
            self._idle[connection] = None


def affordable_connections(asked: int, descriptors: int, nodes: int) -> int:
    """Return how many connections a router may have: `asked`, or fewer if a process may open only `descriptors` files.

    Beyond its descriptors it could accept nobody, however many connections are idle.
    """
    return min(asked, max(descriptors - RESERVED - nodes * RESERVED_PER_NODE, MIN_CONNECTIONS))
