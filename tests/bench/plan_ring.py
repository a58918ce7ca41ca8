"""Measures the time from the write of a plan to its arrival at the last rank, which looks for it without sleeping.

    python -m tests.bench.plan_ring --ranks 8 --plans 2000

Prints microseconds from before the write until the last rank has taken the plan, and from before the plan is made
until the last rank has decoded it. Processes of one host share the clock. There has to be a core for every rank.
"""

from __future__ import annotations

import argparse
import select
import subprocess
import sys
import time
from time import monotonic_ns

import msgspec

from common.engine.sampling.sampling_plan import SamplingVariant
from common.ipc.ring import Ring, RingReader, RingSpec, RingWriter
from decode_node.step_plan import PlannedRow, StepPlan

ROWS = 64
PATIENCE = 60.0  # seconds
GAP = 0.002  # seconds between two plans, like steps
GREEDY = SamplingVariant(all_greedy=True, any_filter=False, num_logprobs=None)


class ReaderPlan(msgspec.Struct):
    """The rings of one reader."""

    plans: RingSpec
    index: int
    arrivals: RingSpec
    count: int


def read(plan: ReaderPlan) -> None:
    """Decode plans as they come, then report when each has arrived."""
    reader = RingReader(Ring(plan.plans), plan.index, "the plans", 0)
    decoder, arrived = msgspec.msgpack.Decoder(StepPlan), list[tuple[int, int]]()
    while len(arrived) < plan.count:
        if (frame := reader.take()) is not None:
            taken = monotonic_ns()
            decoder.decode(frame)
            arrived.append((taken, monotonic_ns()))
    RingWriter(Ring(plan.arrivals), "arrivals", [0]).send(msgspec.msgpack.encode(arrived), PATIENCE)


def measure(readers: int, count: int) -> tuple[list[float], list[float]]:
    """Return the microseconds of each plan from its write until it was taken, and of everything; each ascending."""
    plans = Ring.create(8 << 20, readers)
    arrivals = [Ring.create(1 << 20, 1) for _ in range(readers)]
    children = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.bench.plan_ring", "--reader", text.decode()],
            pass_fds=(*plans.descriptors, *ring.descriptors),
        )
        for index, ring in enumerate(arrivals)
        for text in [msgspec.json.encode(ReaderPlan(plans.spec, index, ring.spec, count))]
    ]
    writer, encoder = RingWriter(plans, "the plans", range(1, readers + 1)), msgspec.msgpack.Encoder()
    rows, sent = tuple(PlannedRow(row, 100, None) for row in range(ROWS)), list[tuple[int, int]]()
    for generation in range(count):
        # The first plans wait for the readers to start.
        time.sleep(GAP if generation else 5.0)
        began = monotonic_ns()
        encoded = encoder.encode(StepPlan(generation=generation, rows=rows, sampling=GREEDY))
        sent.append((monotonic_ns(), began))
        writer.send(encoded, PATIENCE)
    found = []
    for ring in arrivals:
        reader = RingReader(ring, 0, "arrivals", 1)
        while (frame := reader.take()) is None:
            assert select.select([reader], [], [], PATIENCE)[0], "a reader does not answer"
            reader.clear()
        found.append(msgspec.msgpack.decode(frame, type=list[tuple[int, int]]))
    for child in children:
        child.wait(PATIENCE)
    taken, decoded = (
        sorted(
            (max(each) - start) / 1000
            for start, *each in zip(starts, *([times[part] for times in one] for one in found), strict=True)
        )
        for part, starts in enumerate(zip(*sent, strict=True))
    )
    return taken, decoded


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--plans", type=int, default=2000)
    parser.add_argument("--reader")
    given = parser.parse_args()
    if given.reader is not None:
        read(msgspec.json.decode(given.reader, type=ReaderPlan))
        return
    for what, times in zip(("taken", "decoded"), measure(given.ranks - 1, given.plans), strict=True):
        shown = {
            name: round(times[int(share * (len(times) - 1))], 1)
            for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("max", 1.0))
        }
        print(f"ranks {given.ranks} rows {ROWS} plans {given.plans} {what} us {shown}")


if __name__ == "__main__":
    main()
