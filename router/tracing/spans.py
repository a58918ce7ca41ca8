"""Turns a finished request into OpenTelemetry spans: one of the request, and one for each part of its time.

A span of a request has the attributes that vLLM and SGLang give theirs.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Final

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

from router.metrics.request_series import RequestFigures
from router.metrics.request_stages import parts_of
from router.metrics.timeline import Timeline
from router.metrics.trace_context import TraceContext, new_id

ROOT: Final = "router.request"
SCOPE: Final = InstrumentationScope("tandem.router")
SECOND: Final = 1_000_000_000  # in nanoseconds, the unit of spans


def spans_of(
    timeline: Timeline, figures: RequestFigures, trace: TraceContext, model: str, resource: Resource
) -> Iterator[ReadableSpan]:
    """Yield the spans of a request that has just ended: its own, then those of its parts in order."""
    stages = timeline.final_stages
    # Spans have wall-clock times: the stages count back from now.
    began = time.time_ns() - int(stages["finished"] * SECOND)
    own = _context(trace, trace.span_id)
    parent = None if trace.parent_id is None else _context(trace, trace.parent_id, remote=True)
    failed = not timeline.completed
    yield ReadableSpan(
        ROOT,
        own,
        parent,
        resource,
        _attributes(timeline, figures, model),
        kind=SpanKind.SERVER,
        instrumentation_scope=SCOPE,
        status=Status(StatusCode.ERROR, timeline.outcome) if failed else Status(StatusCode.OK),
        start_time=began,
        end_time=began + int(stages["finished"] * SECOND),
    )
    nodes = timeline.nodes[-1] if timeline.nodes else {}
    for name, begin, end in parts_of(stages, timeline.completed):
        node = nodes.get(name.partition(".")[0])
        yield ReadableSpan(
            name,
            _context(trace, new_id(64)),
            own,
            resource,
            {} if node is None else {"tandem.node": node},
            instrumentation_scope=SCOPE,
            start_time=began + int(begin * SECOND),
            end_time=began + int(end * SECOND),
        )


def _context(trace: TraceContext, span_id: int, remote: bool = False) -> SpanContext:
    return SpanContext(trace.trace_id, span_id, remote, TraceFlags(TraceFlags.SAMPLED))


def _attributes(timeline: Timeline, figures: RequestFigures, model: str) -> Mapping[str, str | int | float]:
    stages = timeline.final_stages
    finished = stages["finished"]
    first = stages.get("first_token")
    begun = stages.get("prefill.prefill_start")
    attributes: dict[str, str | int | float] = {
        "gen_ai.request.id": timeline.request_id,
        "gen_ai.request.max_tokens": figures.max_tokens,
        "gen_ai.request.temperature": figures.temperature,
        "gen_ai.request.top_p": figures.top_p,
        "gen_ai.request.n": figures.choices,
        "gen_ai.response.model": model,
        "gen_ai.usage.prompt_tokens": figures.prompt_tokens,
        "gen_ai.usage.completion_tokens": figures.generated_tokens,
        "gen_ai.usage.cached_tokens": figures.cached_tokens,
        "gen_ai.latency.e2e": finished,
        "tandem.outcome": timeline.outcome,
        "tandem.attempts": len(timeline.attempts),
    }
    if begun is not None:
        attributes["gen_ai.latency.time_in_queue"] = begun
    if first is not None:
        attributes["gen_ai.latency.time_to_first_token"] = first
        attributes["gen_ai.latency.time_in_model_decode"] = finished - first
        if begun is not None:
            attributes["gen_ai.latency.time_in_model_prefill"] = max(first - begun, 0.0)
    if timeline.accept_length is not None:
        attributes["tandem.accept_length"] = timeline.accept_length
    return attributes
