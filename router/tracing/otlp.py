"""Sends the spans of requests to an OpenTelemetry collector, by OTLP over HTTP."""

from __future__ import annotations

from collections.abc import Mapping

from aiohttp import web
from aiohttp.typedefs import Handler
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource

from common.observability.logs import Log
from router.http.answer_headers import listener_headers_key
from router.metrics.request_series import RequestFigures
from router.metrics.timeline import Timeline
from router.metrics.trace_context import TRACEPARENT, TraceContext
from router.tracing.span_sender import SpanSender
from router.tracing.spans import spans_of
from router.tracing.traces import Traces, trace_key

EXPORT_SECONDS = 5.0  # for one batch, retries included
CLOSE_SECONDS = 5.0


def _none(request: web.Request) -> Mapping[str, str]:
    return {}


class OtlpTraces(Traces):
    """Traces all requests but those whose caller has decided not to sample."""

    def __init__(self, endpoint: str, model: str, service: str, log: Log) -> None:
        """
        Args:
            endpoint: URL of the collector, without the path of the signal.
            service: the name under which the collector shows this router.
        """
        self._model = model
        self._resource = Resource.create({SERVICE_NAME: service})
        exporter = OTLPSpanExporter(endpoint.rstrip("/") + "/v1/traces", timeout=EXPORT_SECONDS)
        self._sender = SpanSender(exporter, log)

    def add_to(self, app: web.Application) -> None:
        @web.middleware
        async def begin(request: web.Request, handler: Handler) -> web.StreamResponse:
            trace = request[trace_key] = TraceContext.begin(request.headers.get(TRACEPARENT, ""))
            others = request.get(listener_headers_key, _none)
            request[listener_headers_key] = lambda asked: {**others(asked), TRACEPARENT: trace.header}
            return await handler(request)

        app.middlewares.append(begin)

    def finished(self, timeline: Timeline, figures: RequestFigures) -> None:
        trace = timeline.trace
        if trace is not None and trace.sampled:
            self._sender.put(spans_of(timeline, figures, trace, self._model, self._resource))

    def close(self) -> None:
        self._sender.close(CLOSE_SECONDS)
