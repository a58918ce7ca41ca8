"""Spans of a request: its parts are its children, follow each other and add up to its time."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import StatusCode

from router.metrics.request_series import RequestFigures
from router.metrics.timeline import Timeline
from router.metrics.trace_context import TraceContext
from router.tracing.spans import spans_of

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
FIGURES = RequestFigures(20, 5, 16, 6, 1, 5, 0.7, 0.9)


def spans(outcome: str = "stop") -> tuple[ReadableSpan, list[ReadableSpan]]:
    timeline = Timeline("r", 100.0)
    timeline.mark("entered", 100.25)
    timeline.mark("placed", 100.5)
    attempt = timeline.begin_attempt()
    timeline.nodes.append({"prefill": "prefill-1", "decode": "decode-0"})
    timeline.anchor(attempt, {"prefill_start": 0.5, "prefill_end": 1.5}, "prefill", 100.5)
    timeline.mark("first_token", 102.0)
    timeline.anchor(attempt, {"record_seen": 2.0, "step_started": 2.5, "first_decode": 3.0}, "decode", 100.5)
    timeline.mark("finished", 104.0)
    timeline.outcome = outcome
    made = list(spans_of(timeline, FIGURES, TraceContext.begin(PARENT), "tiny", Resource({})))
    return made[0], made[1:]


def test_parts_are_children_that_add_up_to_the_request() -> None:
    root, parts = spans()
    assert [part.name for part in parts] == [
        "router.tokenize",
        "router.queue",
        "prefill.queue",
        "prefill.compute",
        "kv.transfer",
        "decode.queue",
        "decode.stream",
    ]
    assert root.start_time is not None
    assert root.end_time is not None
    assert root.end_time - root.start_time == 4_000_000_000
    assert abs(time.time_ns() - root.end_time) < 60_000_000_000
    assert parts[0].start_time == root.start_time
    assert parts[-1].end_time == root.end_time
    assert all(before.end_time == after.start_time for before, after in pairwise(parts))
    assert all(part.parent == root.context for part in parts)
    assert len({part.context.span_id for part in (root, *parts)}) == 8
    assert {part.name: (part.attributes or {}).get("tandem.node") for part in parts[3:6]} == {
        "prefill.compute": "prefill-1",
        "kv.transfer": None,
        "decode.queue": "decode-0",
    }


def test_a_request_continues_the_trace_of_its_caller_and_says_what_it_did() -> None:
    root, _ = spans()
    assert root.parent is not None
    assert root.parent.is_remote
    assert f"{root.context.trace_id:032x}-{root.parent.span_id:016x}" in PARENT
    attributes = dict(root.attributes or {})
    times = {
        key: attributes[f"gen_ai.latency.{key}"] for key in ("e2e", "time_in_queue", "time_to_first_token")
    }
    assert times == {"e2e": 4.0, "time_in_queue": 1.0, "time_to_first_token": 2.0}
    assert attributes["gen_ai.latency.time_in_model_prefill"] == 1.0
    assert attributes["gen_ai.latency.time_in_model_decode"] == 2.0
    assert attributes["gen_ai.usage.cached_tokens"] == 16
    assert attributes["gen_ai.request.temperature"] == 0.7
    assert root.status.status_code is StatusCode.OK


def test_a_failed_request_is_an_error() -> None:
    root, _ = spans("error: node_lost")
    assert (root.status.status_code, root.status.description) == (StatusCode.ERROR, "error: node_lost")


@pytest.mark.parametrize(
    "header",
    [
        "",
        "00",
        PARENT.upper(),
        PARENT.replace("00-", "ff-", 1),
        "00-" + "0" * 32 + "-b7ad6b7169203331-01",
        "00-0af7651916cd43dd8448eb211c80319c-" + "0" * 16 + "-01",
        PARENT + "a",
        "x" * 100_000,
    ],
)
def test_a_header_that_is_no_traceparent_begins_a_trace(header: str) -> None:
    trace = TraceContext.begin(header)
    assert trace.parent_id is None
    assert trace.trace_id
    assert trace.sampled


def test_contexts_of_one_trace() -> None:
    trace = TraceContext.begin(PARENT)
    assert trace.header == f"00-0af7651916cd43dd8448eb211c80319c-{trace.span_id:016x}-01"
    other = trace.sibling()
    assert (other.trace_id, other.parent_id) == (trace.trace_id, trace.parent_id)
    assert other.span_id != trace.span_id
    assert not TraceContext.begin(PARENT[:-1] + "0").sampled
