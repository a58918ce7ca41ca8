"""The hand-over of requests to a decode node under load: where the time from record to first token goes.

    python -m tests.bench.handover [--algorithm none eagle3] [--rate 16 32] [--pacing late early] [--seconds 10]
        [--json FILE]
    python -m tests.bench.handover --model DIR --draft DIR --device cpu --length 64 --answer 16

One process is a decode node without HTTP; another one stands for the prefill node (`scripted_prefill.py`). Requests
arrive as a Poisson process, at a pool that is full of cached prefixes, as it is after the first minute of a load.
`early` launches each step before the previous one is read, which keeps the GPU busy at any price; `late` is what nodes
do. Idle time: between the events at the end of a step and at the beginning of the next, and the longer steps of `late`
beside `early` at equal batch sizes.
"""

from __future__ import annotations

import argparse
import gc
import json
import mmap
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import zmq

from common.config.schema import Cluster, DecodeSection, Kv, Model, Speculation
from common.engine.forward.rotary_places import rotary_places
from common.engine.graphs import node_graphs
from common.engine.state.relay_state import RelayState
from common.kv_cache.page_space import PageSpace
from common.kv_cache.pool_spec import pool_spec
from common.messages import decode_inbox
from common.messages.decode_inbox import Reserve
from common.messages.generation import SamplingParams
from common.messages.identity import NodeRef, new_incarnation
from common.messages.router_inbox import Failed, RouterMessage, Tokens
from common.node.memory import MemoryPlan
from common.node.serving_model import NodeMemory, ServingModel, page_space
from common.node_plan import PoolBudget
from common.observability.logs import Log
from decode_node.assemble import Assembly, Computation, assemble
from decode_node.build import step_sizes
from decode_node.forwards import step_forwards
from decode_node.limits import DecodeLimits
from decode_node.pacing import PacedCompletion
from decode_node.parts import Links, Observation
from decode_node.peers import PeerConnections
from decode_node.step_plan import StepPlan
from decode_node.step_result import Launched, Worker
from deploy.tiny_models.constructed_head import Drafting
from kv_transfer.handoff_record import record_bytes
from kv_transfer.limits import TransferLimits
from kv_transfer.receiver import Receiver
from kv_transfer.transport.base import Memory, ReceiverEndpoint, Region, Window
from kv_transfer.transport.cuda.pool_memory import as_memory, as_storage
from tests.bench.environment import ROOT, describe
from tests.bench.scripted_prefill import Script
from tests.bench.shapes import EAGLE3, LLAMA, Pair, config_of, loaded, pair
from tests.fakes.fake_link import FakeLink, FakeLinks
from tests.fakes.loopback import LoopbackDescription

PAGE = 16
STEPS = 3
# Stages of a request in order; each takes the time since the one before.
STAGES = ("record_sent", "record_seen", "decode_start", "step_started", "first_decode")
WARM_UP_SECONDS = 2.0


class RecordsOnly(ReceiverEndpoint):
    """An endpoint whose peer writes records to a mapped file, and no pages."""

    def __init__(self, device: torch.device, file: Path) -> None:
        self._device = device
        self._file = file

    def allocate(self, region: Region, nbytes: int) -> Memory:
        if region is Region.KV:
            # Values near zero: no logits of random weights overflow.
            self._pool = torch.zeros(nbytes, dtype=torch.uint8, device=self._device)
            self.kv = as_memory(self._pool)
            return self.kv
        self._file.write_bytes(bytes(nbytes))
        with self._file.open("r+b") as file:
            self.records = memoryview(mmap.mmap(file.fileno(), nbytes))
        return self.records

    def open(self, layout: Any, record_bytes: int) -> None:
        self.layout, self.record_bytes = layout, record_bytes

    def describe(self, incarnation: str) -> LoopbackDescription:
        return LoopbackDescription("bench")

    def announce(self, window: Window) -> None:
        pass

    def revoke(self, generation: int) -> bool:
        return True

    def peer_is_dead(self, incarnation: str) -> bool:
        return False

    def close(self) -> None:
        self.records.release()


class Arrivals(FakeLink):
    """The router: reserves for requests that arrive at random, and keeps when tokens were sent."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], prefill: NodeRef, length: int) -> None:
        super().__init__(context, decode_inbox.codec)  # type: ignore[arg-type]
        self._prefill, self._length = prefill, length
        self._next = float("inf")
        self._rate = 1.0
        self._answer = 1
        self._draw = random.Random(0)
        self._room = 0
        self.heard: list[tuple[float, RouterMessage]] = []

    def begin(self, rate: float, answer: int, seed: int) -> None:
        self._rate, self._answer, self._draw = rate, answer, random.Random(seed)
        self._next = time.monotonic()
        self.heard.clear()

    def end(self) -> None:
        self._next = float("inf")

    def drain(self) -> list[Any]:
        while time.monotonic() >= self._next:
            self._next += self._draw.expovariate(self._rate)
            self._room += 1
            self.deliver(
                Reserve(
                    room=self._room,
                    request_id=f"r{self._room}",
                    token_ids=[8 + self._draw.randrange(64) for _ in range(self._length)],
                    emitted=0,
                    sampling=SamplingParams(max_tokens=self._answer, temperature=0.0),
                    prefill=self._prefill,
                    deadline_ms=600_000,
                )
            )
        return super().drain()

    def send(self, message: RouterMessage) -> None:
        super().send(message)  # which encodes it, as a node does
        self._said.clear()
        self.heard.append((time.monotonic(), message))


@dataclass
class Timed:
    """A worker that records events around each plan."""

    inner: Worker
    device: torch.device
    steps: list[tuple[int, Any, Any]] = field(default_factory=list)  # batch, events at begin and end
    # events around plans that set rows while a step runs
    rows: list[tuple[Any, Any]] = field(default_factory=list)
    rows_host: list[float] = field(default_factory=list)  # seconds of each such call that joins a request
    joined: list[int] = field(default_factory=list)  # per step, by its own plan
    host: list[float] = field(default_factory=list)  # seconds of each call
    launches: list[float] = field(default_factory=list)  # seconds of plan and call
    due_at: float = 0.0  # when the next launch became due

    def clear(self) -> None:
        for kept in (self.steps, self.rows, self.rows_host, self.joined, self.host, self.launches):
            kept.clear()

    def apply(self, plan: StepPlan, /) -> Launched:
        if self.device.type != "cuda":
            return self.inner.apply(plan)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        before = time.perf_counter()
        launched = self.inner.apply(plan)
        now = time.perf_counter()
        if not plan.rows:
            end.record()
            self.rows.append((begin, end))
            if plan.moves.joins:
                self.rows_host.append(now - before)
            return launched
        self.host.append(now - before)
        if self.due_at:
            self.launches.append(now - self.due_at)
        self.due_at = 0.0
        end.record()
        self.joined.append(len(plan.moves.joins))
        self.steps.append((len(plan.rows), begin, end))
        return launched

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


@dataclass(frozen=True, slots=True)
class Row:
    """The result of one load."""

    algorithm: str
    rate: float
    pacing: str
    requests: int
    step_ms: float  # median
    batch: float  # mean
    stages_ms: dict[str, tuple[float, float, float]]  # p50, p99, most
    own_step: tuple[float, float, float]  # record seen to start of the first own step: p50, p99, most
    own_step_in_steps: tuple[float, float]  # the same, in steps: p50, p99
    gap_ms: tuple[float, float, float]  # record sent to first own token
    token_gap_ms: tuple[float, float, float]  # between later tokens
    idle_share: float  # between the events of steps
    launch_ms: tuple[float, float, float]  # plan to launch
    apply_ms: tuple[float, float, float]  # the worker's part of that
    joining_apply_ms: tuple[float, float, float]  # the same for plans of steps that join requests themselves
    rows_apply_ms: tuple[float, float, float]  # the same for plans that join requests while a step runs
    late: int
    missing: int
    steps: int
    stage: int | None  # mark after which steps were launched at the end
    left_ms: list[float]  # time after each mark
    by_batch_ms: dict[int, float]  # median time from the end of a step to the end of the next


def quantiles(values: Sequence[float], scale: float = 1e3) -> tuple[float, float, float]:
    """Return (p50, p99, most) of values, times `scale`."""
    ordered = sorted(values) or [0.0]
    at = [ordered[min(int(share * len(ordered)), len(ordered) - 1)] for share in (0.5, 0.99)]
    return round(scale * at[0], 3), round(scale * at[1], 3), round(scale * ordered[-1], 3)


def fill(space: PageSpace, tokens: int) -> None:
    """Fill the prefix cache with random texts of so many tokens."""
    draw, pages = np.random.default_rng(0), tokens // space.page_size
    while space.free_pages >= pages:
        keys = space.keys(draw.integers(1 << 20, 1 << 21, tokens + PAGE))
        lease = space.lease(keys, pages, max_cached_tokens=0)
        assert lease is not None
        lease.commit(keys)
        lease.release()


class Node:
    """A decode node with its scripted peer."""

    def __init__(self, models: Pair, algorithm: str, max_running: int, length: int, answer: int) -> None:
        self.algorithm, self._answer = algorithm, answer
        device = models.placement.device
        cluster = Cluster(
            model=Model(path="bench"),
            kv=Kv(page_size=PAGE),
            decode=DecodeSection(max_running=max_running),
            speculation=Speculation(algorithm=algorithm, steps=STEPS),
        )
        sizes = replace(step_sizes(cluster, False), one_behind=device.type != "cuda")
        requests, longest = 4 * max_running, length + answer + 2 * sizes.lookahead_slots
        served = self._served(models, algorithm, requests, longest)
        space = page_space(served, True)
        fill(space, length + answer)
        relay = RelayState.allocate(
            max_running, served.config.vocab_size, device, served.draft_shape, served.state.window
        )
        self._directory = tempfile.TemporaryDirectory()
        records = Path(self._directory.name) / "records"
        self.endpoint = RecordsOnly(device, records)
        forwards = step_forwards(
            sizes, served, relay, lambda nbytes: as_storage(self.endpoint.allocate(Region.KV, nbytes))
        )
        for each in forwards.graphs:
            runner = each.forward.graphs
            runner.spec = replace(runner.spec, variants=runner.spec.variants[:1])  # all requests are greedy
            node_graphs.capture(each, Log("bench"))
            assert not [row.error for row in runner.rows if row.error]
        self._context = zmq.Context[zmq.Socket[bytes]]()
        incarnation, theirs = new_incarnation(), new_incarnation()
        address = f"ipc://{self._directory.name}/prefill"
        prefill = NodeRef(name="scripted", role="prefill", incarnation=theirs, peer_address=address)
        carried = served.draft_shape
        slot_bytes = record_bytes(length // PAGE + 1, carried.topk, carried.hidden_bytes)
        limits = TransferLimits(record_bytes=slot_bytes, verify_checksums=False)
        slots = 2 * max_running
        receiver = Receiver(
            incarnation, "bench", self.endpoint, forwards.layout, time.monotonic, limits, slots
        )
        poller = zmq.Poller()
        self._peers = peers = PeerConnections(self._context, "bench", incarnation, receiver, poller)
        self.link = Arrivals(self._context, prefill, length)
        self._device = device

        def timed(worker: Worker) -> Worker:
            self.worker = Timed(worker, device)
            return self.worker

        bounds = DecodeLimits(
            max_running=max_running,
            max_transferring=max_running,
            max_queue=4096,
            max_model_len=served.max_model_len,
            vocab_size=served.config.vocab_size,
            reserved_tokens=64,
            skip_ahead=4,
            drain_timeout=1.0,
            hidden_states=False,
        )
        self.made: Assembly = assemble(
            Links(incarnation, FakeLinks([self.link]), peers, poller, receiver),
            space,
            Computation(
                forwards, relay, sizes.completion(device), rotary_places(served.config.rope), carried
            ),
            bounds,
            0,
            Observation(Log("bench")),
            timed,
        )
        self._late: Callable[[PacedCompletion], bool] = self.made.pacing.due
        script = Script(
            address=address,
            incarnation=theirs,
            records=str(records),
            slot_bytes=slot_bytes,
            tokens=length,
            first_token=models.first_id,
            topk=carried.topk,
            hidden=bytes(carried.hidden_bytes),
            hidden_dtype=carried.dtype_name,
            seconds=(0.02, 0.04),
        )
        command = [sys.executable, "-m", "tests.bench.scripted_prefill", msgspec.json.encode(script).decode()]
        self._peer = subprocess.Popen(command, cwd=ROOT)

    def _served(self, models: Pair, algorithm: str, requests: int, max_len: int) -> ServingModel:
        draft = models.serving if algorithm != "none" else None
        placement, config = models.placement, models.model.config
        dtype = str(placement.dtype).removeprefix("torch.")
        spec = pool_spec(config, None if draft is None else draft.config.model, PAGE, dtype)
        pages = requests * -(-max_len // PAGE) + 1
        budget = NodeMemory(PoolBudget(pages * PAGE, 1.0, "decode"), MemoryPlan(0, 0))
        return ServingModel(
            models.model, config, placement, "bench", spec, pages, max_len, budget, draft=draft
        )

    def close(self) -> None:
        self._peer.kill()
        self._peer.wait()
        self._peers.close()
        self.link.close()
        self._context.term()
        self.endpoint.close()
        self._directory.cleanup()

    def measure(self, rate: float, pacing: str, seconds: float) -> Row:
        """Run one load, whose first seconds are not counted."""
        node, paced = self.made.node, self.made.pacing
        paced.due = self._due if pacing == "late" else self._at_once  # type: ignore[method-assign]
        self.link.begin(rate, self._answer, seed=int(rate))
        self._until(time.monotonic() + WARM_UP_SECONDS, lambda: False)
        self.link.heard.clear()
        self.worker.clear()
        before = replace(paced.counters)
        self._until(time.monotonic() + seconds, lambda: False)
        counted = list(self.link.heard)
        self.link.end()
        row = self._row(rate, pacing, counted, before)
        self._until(time.monotonic() + 60, lambda: not len(node.queues))
        return row

    def _until(self, end: float, over: Callable[[], bool]) -> None:
        while time.monotonic() < end and not over():
            self.made.node.loop.turn()

    def _due(self, step: PacedCompletion) -> bool:
        due = self._late(step)
        if due:
            self.worker.due_at = time.perf_counter()
        return due

    def _at_once(self, step: PacedCompletion) -> bool:
        self._late(step)
        self.worker.due_at = time.perf_counter()
        return True

    def _row(
        self,
        rate: float,
        pacing: str,
        heard: Sequence[tuple[float, RouterMessage]],
        before: Any,
    ) -> Row:
        stages: dict[str, list[float]] = defaultdict(list)
        own, gaps, later = list[float](), list[float](), list[float]()
        latest: dict[int, float] = {}
        for at, message in heard:
            assert not isinstance(message, Failed), message
            if not isinstance(message, Tokens):
                continue
            for run in message.runs:
                if run.offset == 1 and run.stages is not None:
                    times = [run.stages[stage] for stage in STAGES]
                    for stage, begin, end in zip(STAGES[1:], times, times[1:]):
                        stages[stage].append(end - begin)
                    own.append(run.stages["step_started"] - run.stages["record_seen"])
                    gaps.append(times[-1] - times[0])
                elif run.room in latest:
                    later.append(at - latest[run.room])
                latest[run.room] = at
        counters, paced = self.made.pacing.counters, self.made.pacing
        idle, step_ms, by_batch = self._device_times()
        joining = [each for each, joined in zip(self.worker.host, self.worker.joined) if joined]
        in_steps = quantiles([each / (step_ms / 1e3) for each in own], 1.0) if step_ms else (0.0, 0.0, 0.0)
        return Row(
            algorithm=self.algorithm,
            rate=rate,
            pacing=pacing,
            requests=len(own),
            step_ms=round(step_ms, 3),
            batch=round(statistics.mean([batch for batch, _, _ in self.worker.steps] or [0]), 1),
            stages_ms={stage: quantiles(values) for stage, values in stages.items()},
            own_step=quantiles(own),
            own_step_in_steps=in_steps[:2],
            gap_ms=quantiles(gaps),
            token_gap_ms=quantiles(later),
            idle_share=round(idle, 4),
            launch_ms=quantiles(self.worker.launches),
            apply_ms=quantiles(self.worker.host),
            joining_apply_ms=quantiles(joining),
            rows_apply_ms=quantiles(self.worker.rows_host),
            late=counters.late - before.late,
            missing=counters.missing - before.missing,
            steps=counters.steps - before.steps,
            stage=paced.stage,
            left_ms=[round(1e3 * (left or 0.0), 3) for left in paced.left],
            by_batch_ms=by_batch,
        )

    def _device_times(self) -> tuple[float, float, dict[int, float]]:
        """Return (share of time between steps, median ms of a step, median ms from end to end by batch size)."""
        steps = self.worker.steps
        if len(steps) < 2:
            return 0.0, 0.0, {}
        torch.cuda.synchronize()
        idle, periods, by_batch = 0.0, list[float](), defaultdict[int, list[float]](list)
        for (_, _, end), (batch, begin, next_end) in pairwise(steps):
            gap, period = end.elapsed_time(begin), end.elapsed_time(next_end)
            if gap > 50:
                continue  # no request was running
            idle += max(gap, 0.0)
            periods.append(period)
            by_batch[batch].append(period)
        idle -= sum(begin.elapsed_time(end) for begin, end in self.worker.rows)
        medians = {batch: round(statistics.median(each), 3) for batch, each in sorted(by_batch.items())}
        return max(idle, 0.0) / max(sum(periods), 1e-9), statistics.median(periods), medians


@contextmanager
def node(models: Pair, algorithm: str, options: argparse.Namespace) -> Iterator[Node]:
    made = Node(models, algorithm, options.max_running, options.length, options.answer)
    gc.collect()
    gc.freeze()  # as in a node's process
    try:
        yield made
    finally:
        gc.unfreeze()
        made.close()


def line(row: Row) -> str:
    """Return the row as text."""
    stages = ", ".join(f"{stage} {p50:.2f}/{p99:.2f}" for stage, (p50, p99, _) in row.stages_ms.items())
    return (
        f"{row.algorithm} {row.rate:g}/s {row.pacing}: {row.requests} requests, step {row.step_ms:.2f} ms, batch "
        f"{row.batch:.0f}; {stages}; seen to own step {row.own_step} ms = {row.own_step_in_steps} steps; gap "
        f"{row.gap_ms}; later gaps {row.token_gap_ms}; idle {100 * row.idle_share:.2f} %; launch {row.launch_ms}, "
        f"worker {row.apply_ms}, joining {row.joining_apply_ms}, rows "
        f"{row.rows_apply_ms}; late {row.late}, missing {row.missing} of "
        f"{row.steps}; mark {row.stage} of {row.left_ms}"
    )


def against_early(rows: Sequence[Row]) -> str:
    """Compare step times of `late` with those of `early` by batch size."""
    found = []
    for late in rows:
        early = next(
            (
                each
                for each in rows
                if (each.algorithm, each.rate, each.pacing) == (late.algorithm, late.rate, "early")
            ),
            None,
        )
        if late.pacing == "late" and early is not None:
            ratios = [
                late.by_batch_ms[batch] / early.by_batch_ms[batch]
                for batch in late.by_batch_ms.keys() & early.by_batch_ms.keys()
            ]
            if ratios:
                found.append(f"{late.algorithm} {late.rate:g}/s: {statistics.median(ratios):.4f}")
    return "late / early at equal batch sizes: " + ", ".join(found)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shape", default=LLAMA)
    parser.add_argument("--model", type=Path, help="directory of a target to load instead")
    parser.add_argument("--draft", type=Path, help="directory of its draft")
    parser.add_argument("--algorithm", nargs="+", default=["none", EAGLE3])
    parser.add_argument("--rate", type=float, nargs="+", default=[16.0, 32.0])
    parser.add_argument("--pacing", nargs="+", choices=("late", "early"), default=["late", "early"])
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--answer", type=int, default=256)
    parser.add_argument("--max-running", type=int, default=64)
    parser.add_argument("--acceptance", type=float, default=0.7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device, began = torch.device(options.device), time.perf_counter()
    if options.model is None:
        models = pair(config_of(options.shape), EAGLE3, Drafting(options.acceptance), STEPS, 0, device)
    else:
        models = loaded(options.model, options.draft, STEPS, device)
    print(f"models made in {time.perf_counter() - began:.1f} s", flush=True)
    report, rows = {**describe(), "options": vars(options)}, list[Row]()
    for algorithm in options.algorithm:
        with node(models, algorithm, options) as made:
            print(f"{algorithm}: node ready after {time.perf_counter() - began:.1f} s", flush=True)
            for rate in options.rate:
                for pacing in options.pacing:
                    rows.append(made.measure(rate, pacing, options.seconds))
                    print(line(rows[-1]), flush=True)
                    if options.json:
                        written = {**report, "rows": [asdict(row) for row in rows]}
                        options.json.write_text(json.dumps(written, indent=1, default=str) + "\n")
    print(against_early(rows))


if __name__ == "__main__":
    main()
