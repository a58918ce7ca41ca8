"""The interface of tracing, and the tracing that records nothing."""

from __future__ import annotations

from aiohttp import web

from router.metrics.request_series import RequestFigures
from router.metrics.timeline import Timeline
from router.metrics.trace_context import TraceContext

# Set for every HTTP request while the router traces.
trace_key: web.RequestKey[TraceContext] = web.RequestKey("trace", TraceContext)


class Traces:
    """Records nothing; subclasses send spans."""

    def add_to(self, app: web.Application) -> None:
        """Give every HTTP request of this application a place in a trace."""

    def finished(self, timeline: Timeline, figures: RequestFigures) -> None:
        """Take a request that is over. Never blocks; what the collector does not take in time is dropped."""

    def close(self) -> None:
        """Send what is left, within a few seconds."""


NO_TRACES = Traces()
