"""The router as one object: the order in which its parts start and drain."""

from __future__ import annotations

import asyncio
import time

from common.errors import Unavailable
from router.api_routes import ApiRoutes
from router.availability import SHUTTING_DOWN, Availability
from router.core import Core
from router.parts import ChildProcesses, ControlLink, Observation
from router.server.listeners import HttpListeners

# Once other processes have taken over the port, open connections are closed when they have been idle for this long. A
# client that uses one at the same instant gets no answer.
LINGER_SECONDS = 1.0


class RouterApp:
    """A router that `start` starts.

    `drain` ends it: it reports "not ready", lets requests finish and closes the sockets.
    """

    def __init__(
        self,
        core: Core,
        availability: Availability,
        routes: ApiRoutes,
        http: HttpListeners,
        children: ChildProcesses,
        link: ControlLink,
        observation: Observation,
        drain_timeout: float,
    ) -> None:
        """`drain_timeout`: seconds that requests in flight get to finish."""
        self.core = core
        self.availability = availability
        self.http = http
        self.children = children
        self.link = link
        self._routes = routes
        self._log = observation.log
        self._events = observation.events
        self._traces = observation.traces
        self._drain_timeout = drain_timeout

    @property
    def active(self) -> int:
        """Number of requests in progress, from reading their texts and images to the end of the answer."""
        return self._routes.active

    @property
    def generating(self) -> int:
        """Number of requests or of answers in progress, whichever are more: a request may ask for many answers."""
        return max(self.active, self.core.dispatcher.active)

    async def start(self) -> None:
        """Listen for nodes, start the text workers, then listen for clients.

        Raises ConfigError or ModelError, after closing everything.
        """
        try:
            self.core.start()
            await self.children.start()
            await self.http.start()
        except BaseException:
            await self.close()
            raise

    async def drain(self) -> None:
        """Finish the requests, then close."""
        await self.finish_requests()
        await self.close()

    async def finish_requests(self) -> None:
        """Refuse new requests, let those in flight finish until the drain timeout has passed, then end the others.

        If other router processes take new connections, no request is refused: each connection gets one more answer, or
        is closed once nobody has asked anything for LINGER_SECONDS.
        """
        self.availability.leaving = self.http.leave_port()
        self.availability.draining = not self.availability.leaving
        self._log.info("draining", requests=self.active)
        asked = time.monotonic()
        deadline = asked + self._drain_timeout
        while (now := time.monotonic()) < deadline:
            if self.active:
                asked = now
            elif (
                not (self.availability.leaving and self.http.open_connections) or now > asked + LINGER_SECONDS
            ):
                break
            await asyncio.sleep(0.05)
        self.availability.draining = True
        self.core.dispatcher.end_all(Unavailable(f"{SHUTTING_DOWN}, and the answer was not ready in time"))

    async def close(self) -> None:
        """Close all sockets and end the child processes."""
        # Gives the last answers time to be sent and cancels the rest, so that aborts reach the nodes before the socket
        # closes.
        await self.http.close()
        await asyncio.sleep(0.05)
        self.core.close()
        self._events.close()
        await asyncio.to_thread(self._traces.close)
        await self.children.close()
        self.link.security.close()
        self.link.context.term()
