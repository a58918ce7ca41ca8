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

from collections.abc import Mapping
from itertools import pairwise

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
# (part, its end, the part that follows), without the last part
_UNTIL_LAST = tuple((name, ENDS[name], after) for name, after in pairwise(ENDS))

# Its name, and when it begins and ends, in seconds since the arrival of the request.
Part = tuple[str, float, float]


def parts_of(stages: Mapping[str, float], completed: bool) -> list[Part]:
    """Return the parts of a request that is over, by the final stages of its timeline.

    They cover its time from 0 to `finished`. Nodes report times by their own clocks: a part that would end before it
    begins is left out. A part whose end nobody reported is merged into the next one that has an end; without one it is
    the last part.
    """
    finished = stages["finished"]
    parts: list[Part] = []
    at, last = 0.0, next(iter(ENDS))
    for name, stage, after in _UNTIL_LAST:
        end = stages.get(stage)
        if end is not None:
            last = after
            if end > at:
                end = min(end, finished)
                parts.append((name, at, end))
                at = end
    if last == "kv.transfer" and completed:
        last = ANSWER
    parts.append((last, at, finished))
    return parts
