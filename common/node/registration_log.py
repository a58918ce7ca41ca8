"""Says in a node's log which routers have registered it, and while none has, why not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from common.node.router_link import RouterLink
from common.observability.logs import Log

FIRST_SECONDS = 10.0  # without a router until the log says so
REPEAT_SECONDS = 60.0
MAX_ROUTERS = 4  # whose reasons are in one line


class RegistrationLog:
    """Used by the node's main thread."""

    def __init__(self, log: Log, now: float) -> None:
        """`now`: monotonic seconds."""
        self._log = log
        self._registered: list[RouterLink[Any]] = []
        self._due = now + FIRST_SECONDS

    def look(self, links: Sequence[RouterLink[Any]], now: float) -> None:
        """Log what has changed, and from time to time that no router has registered this node."""
        registered = [link for link in links if link.registered]
        for link in registered:
            if link not in self._registered:
                self._log.info("a router has registered this node", router=link.address)
        if registered or self._registered:
            self._due = now + FIRST_SECONDS
        elif now >= self._due:
            self._due = now + REPEAT_SECONDS
            reasons = {link.address: link.unregistered_because() for link in links[:MAX_ROUTERS]}
            self._log.warning("no router has registered this node: it gets no requests", routers=reasons)
        self._registered = registered
