"""Traces of requests through a router's HTTP side reach a collector over HTTP."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from common.errors import ConfigError
from common.observability.logs import Log
from router.http.answer_headers import add_answer_headers
from router.metrics.request_series import RequestFigures
from router.metrics.timeline import Timeline
from router.tracing import choice, span_sender
from router.tracing.choice import make_traces
from router.tracing.span_sender import SpanSender
from router.tracing.traces import NO_TRACES, trace_key
from tests.fakes.collector import collector, spans_in
from tests.unit.common.test_throughput import Lines

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


async def test_a_request_is_traced_to_the_collector() -> None:
    with collector() as (address, batches):
        traces = make_traces(address, "tiny", Log("test"))

        async def answer(request: web.Request) -> web.Response:
            timeline = Timeline("r", 0.0)
            timeline.trace = request[trace_key]
            timeline.mark("finished", 2.0)
            traces.finished(timeline, RequestFigures(1, 1))
            return web.Response()

        app = web.Application()
        app.router.add_get("/", answer)
        traces.add_to(app)
        app.on_response_prepare.append(add_answer_headers)
        async with TestClient(TestServer(app)) as client:
            async with client.get("/", headers={"traceparent": PARENT}) as response:
                own = response.headers["traceparent"]
            await client.get("/", headers={"traceparent": PARENT[:-1] + "0"})
        await asyncio.to_thread(traces.close)
        batch = batches.get(timeout=30)
    spans = spans_in(batch)
    assert [span.name for span in spans] == ["router.request", "router.tokenize"], "the other was not sampled"
    root, part = spans
    assert own == f"00-{root.trace_id.hex()}-{root.span_id.hex()}-01"
    assert PARENT.startswith(f"00-{root.trace_id.hex()}-{root.parent_span_id.hex()}")
    assert part.parent_span_id == root.span_id
    names = {each.key: each.value.string_value for each in batch.resource_spans[0].resource.attributes}
    assert names["service.name"] == "tandem-router"


def test_the_environment_names_a_collector_and_without_one_nothing_is_traced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(choice.VARIABLE, raising=False)
    assert make_traces("", "tiny", Log("test")) is NO_TRACES
    monkeypatch.setenv(choice.VARIABLE, "collector:4318")
    with pytest.raises(ConfigError, match=r"OTEL_EXPORTER_OTLP_ENDPOINT.*http://HOST:4318"):
        make_traces("", "tiny", Log("test"))


def test_a_missing_package_is_refused_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(path: str) -> Any:
        raise ModuleNotFoundError("No module named 'opentelemetry'", name="opentelemetry")

    monkeypatch.setattr(choice, "named", missing)
    with pytest.raises(
        ConfigError,
        match=r"router\.otlp_endpoint.*opentelemetry.*pip install -e '\.\[otel\]'` in the checkout",
    ):
        make_traces("http://127.0.0.1:4318", "tiny", Log("test"))


class FailsOnce(SpanExporter):
    """Raises for the first batch, as the encoder does for a time outside of its range."""

    def __init__(self) -> None:
        self.begun, self.exported = threading.Event(), threading.Event()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        if not self.begun.is_set():
            self.begun.set()
            raise ValueError("Value out of range: -1")
        self.exported.set()
        return SpanExportResult.SUCCESS


def test_spans_that_cannot_be_exported_do_not_end_the_tracing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(span_sender, "INTERVAL", 0.001)
    exporter, lines = FailsOnce(), Lines()
    sender = SpanSender(exporter, lines)
    sender.put([ReadableSpan("bad")])
    assert exporter.begun.wait(30)
    sender.put([ReadableSpan("good")])
    assert exporter.exported.wait(30)
    sender.close(30)
    assert [line["spans"] for line in lines.kept] == [1]


class Stuck(SpanExporter):
    """Exports nothing until it is released."""

    def __init__(self) -> None:
        self.begun, self.released = threading.Event(), threading.Event()
        self.ended = threading.Event()
        self.exported = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.begun.set()
        self.released.wait(30)
        self.exported += len(spans)
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        assert self.released.is_set(), "an export is in progress"
        self.ended.set()


def test_spans_of_a_request_are_exported_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread looks for spans while they are still being made."""
    monkeypatch.setattr(span_sender, "INTERVAL", 0.001)
    batches: list[list[str]] = []

    class Noting(SpanExporter):
        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            batches.append([span.name for span in spans])
            return SpanExportResult.SUCCESS

    def made() -> Iterator[ReadableSpan]:
        yield ReadableSpan("request")
        # Enough for many looks of the thread.
        time.sleep(0.05)
        yield ReadableSpan("part")

    sender = SpanSender(Noting(), Log("test"))
    sender.put(made())
    sender.close(30)
    assert batches == [["request", "part"]]


def test_what_the_collector_does_not_take_in_time_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(span_sender, "MAX_QUEUED", 10)
    monkeypatch.setattr(span_sender, "INTERVAL", 0.001)
    exporter, lines = Stuck(), Lines()
    sender = SpanSender(exporter, lines)
    sender.put([ReadableSpan("first")])
    assert exporter.begun.wait(30)
    for _ in range(5):
        sender.put([ReadableSpan("a"), ReadableSpan("b"), ReadableSpan("c")])
    exporter.released.set()
    sender.close(30)
    assert exporter.exported == 1 + 12
    assert [line["requests"] for line in lines.kept] == [1]
    assert exporter.ended.is_set()


def test_the_end_waits_for_a_bounded_time_and_leaves_an_export_in_progress_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(span_sender, "INTERVAL", 0.001)
    exporter, lines = Stuck(), Lines()
    sender = SpanSender(exporter, lines)
    sender.put([ReadableSpan("first")])
    assert exporter.begun.wait(30)
    sender.put([ReadableSpan("late")])
    sender.close(0.05)
    assert not exporter.ended.is_set()
    exporter.released.set()
    assert exporter.ended.wait(30)
    assert exporter.exported == 1
    assert [line["spans"] for line in lines.kept] == [1]
