"""The way back to the router that sent a request. Every request on a node has one."""

from __future__ import annotations

from typing import Final, Protocol

from common.messages.router_inbox import RouterMessage


class ToRouter(Protocol):
    """Sends messages to one router; RouterLink implements it."""

    def send(self, message: RouterMessage, /) -> None:
        """Send without blocking."""
        ...


class NoRouter:
    """The router of requests that no router sent, as in benchmarks: messages to it are dropped."""

    def send(self, message: RouterMessage, /) -> None:
        pass


NO_ROUTER: Final = NoRouter()
