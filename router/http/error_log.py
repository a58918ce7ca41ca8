"""Log lines about requests that are answered with an error, at a bounded rate."""

from __future__ import annotations

from aiohttp import web

from common.errors import ClientGone
from common.observability.bounded_log import BoundedLog
from common.observability.logs import Log
from router.http.client import client_key
from router.http.flushed_logs import FlushedLogs
from router.http.matched_route import matched_route

MAX_REASON = 300  # characters of an error message


class ErrorLog:
    """Logs errors of clients and those of the server, each at its own rate: the former must not displace the latter."""

    def __init__(self, log: Log) -> None:
        self._refused = BoundedLog(log, "refused a request")
        self._failed = BoundedLog(log, "failed a request")
        self._both = FlushedLogs(self._refused, self._failed)

    def note(
        self, request: web.Request, request_id: str, status: int, param: str | None, reason: str
    ) -> None:
        """Log one error, except of a client that has left, and of a request that the gate refuses and logs itself."""
        client = request.get(client_key)
        if client is None or status == ClientGone.status:
            return
        about: dict[str, object] = {
            "request_id": request_id,
            "route": matched_route(request),
            "status": status,
        }
        if param is not None:
            about["param"] = param
        if status < 500:
            self._refused.info(client.name, reason[:MAX_REASON], **about)
        else:
            self._failed.warning(client.name, reason[:MAX_REASON], **about)
        self._both.noted()

    async def close(self, app: web.Application) -> None:
        """Log the counts of a window that is not over yet. Registered in Application.on_cleanup."""
        self._both.close()
