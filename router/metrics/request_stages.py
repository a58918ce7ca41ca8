"""Divides the time of a request into parts that follow each other without gaps: for metrics and for traces.

router.tokenize  from its arrival until its prompt is token ids
router.queue     until a prefill and a decode node have it; with several attempts, until the last of them began
prefill.queue    until its first forward begins
prefill.compute  until the prefill node has drawn the first token
kv.transfer      until the decode node has read the handoff record; pages that leave during forwards take no time here
decode.queue     until its first step begins
decode.stream    until the last token is with the client's connection
router.answer    from the first token on, if the request ended with it
"""

from __future__ import annotations

from typing import NamedTuple

from router.metrics.timeline import Timeline

ANSWER = "router.answer"
# part -> the stage in the timeline at which it ends
ENDS = {
    "router.tokenize": "entered",
    "router.queue": "placed",
    "prefill.queue": "prefill.prefill_start",
    "prefill.compute": "prefill.prefill_end",
    "kv.transfer": "decode.record_seen",
    "decode.queue": "decode.step_started",
    "decode.stream": "finished",
}
PARTS = (*ENDS, ANSWER)


class Part(NamedTuple):
    """One part of a request's time, in seconds since its arrival."""

    name: str
    begin: float
    end: float


def parts_of(timeline: Timeline) -> list[Part]:
    """Return the parts of a request that is over, by the stages of its last attempt.

    They cover its time from 0 to `finished`. Nodes report times by their own clocks: a stage that would end before the
    part begins has no length. A part whose end nobody reported is merged into the next one that has an end.
    """
    stages = timeline.final_stages
    finished = stages["finished"]
    parts, at = [], 0.0
    for name, stage in ENDS.items():
        end = stages.get(stage)
        if end is None:
            continue
        if stage == "finished" and _ended_with_first_token(timeline, stages):
            name = ANSWER
        end = min(max(end, at), finished)
        parts.append(Part(name, at, end))
        at = end
    return parts


def _ended_with_first_token(timeline: Timeline, stages: dict[str, float]) -> bool:
    return timeline.completed and "prefill.prefill_end" in stages and "decode.first_decode" not in stages
