"""Times of first tokens under load, by a simulation with a virtual clock: the scheduler's own decisions, no model.

    python -m tests.bench.first_tokens [--seconds 60] [--seeds 3] [--rates 16 32] [--json FILE]

Prompts arrive at random (Poisson). The scheduler of the prefill node chooses each forward, which takes as long as the
cost curve of the 8B shape on one H200 says; later chunks of a prompt take longer by their context. The former policy
packed prompts in order up to the largest forward, as soon as the previous one began to run.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from common.messages.generation import SamplingParams
from prefill_node.cost_curve import CostCurve
from prefill_node.request import PrefillRequest
from prefill_node.scheduler import Chunk, in_order, plan_chunks

# Milliseconds of prompts of the 8B shape on one H200 (bf16), by tokens.
MEASURED = {64: 5.3, 512: 13.4, 1024: 25.0, 2048: 49.6, 8192: 221.0}
MIXES: dict[str, Sequence[tuple[int, float]]] = {
    "1024": [(1024, 1.0)],
    "mix": [(64, 0.25), (512, 0.3), (1024, 0.3), (2048, 0.1), (8192, 0.05)],
}
LARGEST = 8192
HOST_MS = 1.1  # from a decision to the start of its forward on an idle GPU
LEAD_MS = 3.0  # how long before the predicted end of a forward the next one is decided

Choose = Callable[[Sequence[PrefillRequest], float, CostCurve], list[Chunk]]


@dataclass(frozen=True, slots=True)
class Policy:
    """How forwards are chosen, and when."""

    choose: Choose
    late: bool  # decided LEAD_MS before the running forward ends, not when it begins


def packed(computing: Sequence[PrefillRequest], now: float, curve: CostCurve) -> list[Chunk]:
    """Choose as before: prompts in order up to the largest forward, of which the last is cut."""
    left, chunks = curve.largest, list[Chunk]()
    for request in in_order([each for each in computing if each.remaining], now):
        length = min(request.remaining, left)
        if length == 0:
            break
        chunks.append(Chunk(request, request.scheduled, length))
        left -= length
    return chunks


def shared(computing: Sequence[PrefillRequest], now: float, curve: CostCurve) -> list[Chunk]:
    """Choose as the node does."""
    return plan_chunks(computing, now, curve, 64)


POLICIES = {
    "packed to 8,192, early (former)": Policy(packed, late=False),
    "packed to 8,192, late": Policy(packed, late=True),
    "by cost, early": Policy(shared, late=False),
    "by cost, late (current)": Policy(shared, late=True),
}


def prompt(room: int, tokens: int, at: float) -> PrefillRequest:
    return PrefillRequest(
        room=room,
        request_id=str(room),
        keys=np.empty(tokens, dtype=np.int64),
        emitted=0,
        sampling=SamplingParams(max_tokens=1),
        decode="d",
        received=at,
        deadline=1e9,
    )


def arrivals(
    mix: Sequence[tuple[int, float]], rate: float, seconds: float, seed: int
) -> list[PrefillRequest]:
    """Return prompts in order of arrival."""
    rng, at, found = random.Random(seed), 0.0, list[PrefillRequest]()
    lengths, weights = [tokens for tokens, _ in mix], [weight for _, weight in mix]
    while (at := at + rng.expovariate(rate)) < seconds:
        found.append(prompt(len(found), rng.choices(lengths, weights)[0], at))
    return found


def simulate(prompts: Sequence[PrefillRequest], policy: Policy, curve: CostCurve) -> list[float]:
    """Return the time to first token of each prompt in milliseconds."""
    waits, coming = dict[int, float](), list(reversed(prompts))
    computing: list[PrefillRequest] = []
    ends = decided = 0.0  # seconds: when the running forward ends, when the latest one was decided
    began = 0.0
    while coming or computing:
        due = max(decided, ends - LEAD_MS / 1e3 if policy.late else began)
        while coming and coming[-1].received <= due:
            computing.append(coming.pop())
        if not computing:
            due = coming[-1].received if policy.late else max(ends, coming[-1].received)
            while coming and coming[-1].received <= due:
                computing.append(coming.pop())
        chunks = policy.choose(computing, due, curve)
        began = max(ends, due + HOST_MS / 1e3)
        decided = due + HOST_MS / 1e3
        tokens = sum(chunk.length for chunk in chunks)
        ends = began + curve.ms(tokens, sum(chunk.start * chunk.length for chunk in chunks)) / 1e3
        for chunk in chunks:
            chunk.request.launched_at = due
            chunk.request.scheduled += chunk.length
            if chunk.final:
                waits[chunk.request.room] = (ends - chunk.request.received) * 1e3
        computing = [each for each in computing if each.remaining]
    return [waits[each.room] for each in prompts]
