"""Times of first tokens under load, by a simulation with a virtual clock: the scheduler's own decisions, no model.

    python -m tests.bench.first_tokens [--seconds 60] [--seeds 3] [--rates 16 32] [--json FILE]

Prompts arrive at random (Poisson). The scheduler of the prefill node chooses each forward, which takes as long as the
cost curve of the 8B shape on one H200 says; later chunks of a prompt take longer by their context. The former policy
packed prompts in order up to the largest forward, as soon as the previous one began to run.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from common.engine.graphs.ladders import prefill_token_buckets
from common.messages.generation import SamplingParams
from prefill_node.arrivals import RecentArrivals
from prefill_node.cost_curve import CostCurve
from prefill_node.request import PrefillRequest
from prefill_node.scheduler import Chunk, in_order, plan_chunks

# Milliseconds of prompts of the 8B shape on one H200 (bf16), by tokens.
MEASURED = {64: 4.6, 128: 5.0, 256: 6.5, 512: 12.9, 1024: 24.5, 2048: 50.2, 4096: 101.0, 8192: 215.5}
CONTEXT_MS = 1.62e-6  # per token and token of its context, from 8,192 tokens in chunks of 1,024
MIXES: dict[str, Sequence[tuple[int, float]]] = {
    "1024": [(1024, 1.0)],
    "8192": [(8192, 1.0)],
    "mix": [(64, 0.25), (512, 0.3), (1024, 0.3), (2048, 0.1), (8192, 0.05)],
}
LARGEST = 8192
IN_TIME_MS = 200.0
HOST_MS = 1.1  # from a decision to the start of its forward on an idle GPU
LEAD_MS = 3.0  # how long before the predicted end of a forward the next one is decided

Choose = Callable[[Sequence[PrefillRequest], float, CostCurve, RecentArrivals], list[Chunk]]


@dataclass(frozen=True, slots=True)
class Policy:
    """How forwards are chosen, and when."""

    choose: Choose
    late: bool  # decided LEAD_MS before the running forward ends, not when it begins


def packed(
    computing: Sequence[PrefillRequest], now: float, curve: CostCurve, recent: RecentArrivals
) -> list[Chunk]:
    """Choose as before: prompts in order up to the largest forward, of which the last is cut."""
    left, chunks = curve.largest, list[Chunk]()
    for request in in_order([each for each in computing if each.remaining], now):
        length = min(request.remaining, left)
        if length == 0:
            break
        chunks.append(Chunk(request, request.scheduled, length))
        left -= length
    return chunks


def shared(
    computing: Sequence[PrefillRequest], now: float, curve: CostCurve, recent: RecentArrivals
) -> list[Chunk]:
    """Choose as the node does."""
    return plan_chunks(computing, now, curve, 64, 1, recent)


POLICIES = {
    "packed to 8,192, early (former)": Policy(packed, late=False),
    "packed to 8,192, late": Policy(packed, late=True),
    "by cost, early": Policy(shared, late=False),
    "by cost, late (current)": Policy(shared, late=True),
}


def h200() -> CostCurve:
    """Return the curve of the 8B shape on one H200."""
    return CostCurve(prefill_token_buckets(LARGEST), MEASURED, context_ms=CONTEXT_MS)


def prompt(room: int, tokens: int, at: float) -> PrefillRequest:
    return PrefillRequest(
        room=room,
        request_id=str(room),
        keys=np.empty(tokens, dtype=np.int64),
        emitted=0,
        sampling=SamplingParams(max_tokens=1),
        decode="d",
        received=at,
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
    began, recent = 0.0, RecentArrivals()

    def take() -> None:
        request = coming.pop()
        recent.add(request.num_tokens, request.received)
        computing.append(request)

    while coming or computing:
        due = max(decided, ends - LEAD_MS / 1e3 if policy.late else began)
        while coming and coming[-1].received <= due:
            take()
        if not computing:
            due = coming[-1].received if policy.late else max(ends, coming[-1].received)
            while coming and coming[-1].received <= due:
                take()
        chunks = policy.choose(computing, due, curve, recent)
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


@dataclass(frozen=True, slots=True)
class Row:
    """The first tokens of one policy under one load; a list has one entry per seed."""

    mix: str
    rate: float  # prompts per second
    policy: str
    p50: list[float]  # milliseconds
    p99: list[float]
    most: list[float]
    in_time: list[float]  # share of prompts whose first token comes within 200 ms


def measure(mix: str, rate: float, policy: str, seconds: float, seeds: int) -> Row:
    """Simulate one policy with the same arrivals that every other one gets."""
    row = Row(mix, rate, policy, [], [], [], [])
    for seed in range(seeds):
        curve = h200()
        waits = np.asarray(simulate(arrivals(MIXES[mix], rate, seconds, seed), POLICIES[policy], curve))
        summary(row, waits)
    return row


def summary(row: Row, waits: NDArray[np.float64]) -> Row:
    """Add the figures of one run to a row."""
    p50, p99 = np.percentile(waits, [50, 99])
    row.p50.append(round(float(p50), 1))
    row.p99.append(round(float(p99), 1))
    row.most.append(round(float(waits.max()), 1))
    row.in_time.append(round(float(np.mean(waits <= IN_TIME_MS)), 4))
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="of virtual time")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rates", type=float, nargs="+", default=[16.0, 32.0], help="of 1,024-token prompts")
    parser.add_argument("--mix-rates", type=float, nargs="+", default=[8.0, 16.0], help="of the mix")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    print(f"{'prompts':>8} {'per s':>6} {'policy':32} {'p50 ms':>22} {'p99 ms':>22} {'max ms':>24} in 200 ms")
    for mix, rates in (("1024", options.rates), ("mix", options.mix_rates)):
        for rate in rates:
            for policy in POLICIES:
                row = measure(mix, rate, policy, options.seconds, options.seeds)
                rows.append(row)
                times = f"{_list(row.p50):>22} {_list(row.p99):>22} {_list(row.most):>24}"
                print(f"{mix:>8} {rate:>6g} {policy:32} {times} {_list(row.in_time)}", flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


def _list(values: Sequence[float]) -> str:
    return ", ".join(f"{value:g}" for value in values)


if __name__ == "__main__":
    main()
