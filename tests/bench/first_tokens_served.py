"""Times of first tokens under load through the prefill step of a real model, for comparison with `first_tokens`.

    python -m tests.bench.first_tokens_served [--shape DIRECTORY] [--rates 16 32] [--seconds 12] [--json FILE]

The same arrivals and the same policies as in the simulation, without sockets, transfers and a decode node: prompts of
random tokens run through the node's loop, pacing, cost curve and forwards.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from common.engine.graphs.ladders import prefill_token_buckets
from common.node.overlap import Completion, OverlapLoop
from prefill_node.arrivals import RecentArrivals
from prefill_node.cost_curve import CostCurve
from prefill_node.draft import NoDraft
from prefill_node.forward_times import ForwardTimes
from prefill_node.measure import MeasuredNode, measure_forwards
from prefill_node.pacing import NO_PACING, LaunchPacing
from prefill_node.planner import prompt_plan
from prefill_node.request import PrefillRequest
from prefill_node.scheduler import Chunk
from prefill_node.step import LaunchedPrefill
from prefill_node.step_rules import PromptRules
from tests.bench import shapes
from tests.bench.engine import PAGE, constructed_runner
from tests.bench.environment import describe
from tests.bench.first_tokens import MIXES, POLICIES, Policy, Row, arrivals, summary
from tests.bench.prompt_gaps import Prompts

POLL = 0.0001  # seconds between looks at the clock


@dataclass(frozen=True, slots=True)
class LaunchedChunks:
    """A forward and its chunks."""

    chunks: Sequence[Chunk]
    launched: LaunchedPrefill

    @property
    def completion(self) -> Completion:
        return self.launched.completion


class Run:
    """One run of a policy over a list of arrivals."""

    def __init__(self, prompts: Prompts, policy: Policy, times: ForwardTimes) -> None:
        self._prompts = prompts
        self._choose = policy.choose
        self._times = times
        self._pacing = LaunchPacing(time.perf_counter) if policy.late else NO_PACING
        self._recent = RecentArrivals()
        self._coming: deque[PrefillRequest] = deque()
        self._computing: dict[int, PrefillRequest] = {}
        self.waits: dict[int, float] = {}  # milliseconds

    def run(self, coming: Sequence[PrefillRequest]) -> list[float]:
        """Serve all prompts. Returns the time to first token of each in milliseconds."""
        begin = time.perf_counter() + 0.1
        for request in coming:
            request.received += begin
        self._coming.extend(coming)
        OverlapLoop(self._prepare, self._launch, self._finish, self._rest, self._ended, self._rest).run()
        return [self.waits[each.room] for each in coming]

    def _ended(self) -> bool:
        return not self._coming and not self._computing

    def _rest(self) -> None:
        time.sleep(POLL)

    def _prepare(self) -> Sequence[Chunk] | None:
        self._pacing.hold(self._rest)
        now = time.perf_counter()
        while self._coming and self._coming[0].received <= now:
            request = self._coming[0]
            if not self._prompts.admit(request):
                break
            self._computing[self._coming.popleft().room] = request
            self._recent.add(request.num_tokens, request.received)
        return self._choose(list(self._computing.values()), now, self._times.curve, self._recent) or None

    def _launch(self, chunks: Sequence[Chunk]) -> LaunchedChunks:
        self._times.begin(chunks)
        launched = self._prompts.step.launch(prompt_plan(chunks, PAGE, PromptRules(), 1))
        for chunk in chunks:
            chunk.request.launched_at = time.perf_counter()
            chunk.request.scheduled += chunk.length
        self._pacing.launched(launched.completion, self._times.latest_seconds)
        return LaunchedChunks(chunks, launched)

    def _finish(self, done: LaunchedChunks) -> None:
        self._times.end(done.launched.read().ms)
        for chunk in done.chunks:
            if chunk.final:
                request = self._computing.pop(chunk.request.room)
                self.waits[request.room] = 1e3 * (time.perf_counter() - request.received)
                assert request.lease is not None
                request.lease.release()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default=shapes.LLAMA, help="a shape of tests.bench.shapes, or a directory")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--graphs", default="breakable")
    parser.add_argument("--mix", default="1024", choices=sorted(MIXES))
    parser.add_argument("--rates", type=float, nargs="+", default=[16.0, 32.0])
    parser.add_argument("--seconds", type=float, default=12.0)
    parser.add_argument("--chunk", type=int, default=8192, help="tokens of the largest forward")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device, chunk = torch.device(options.device), options.chunk
    runner = constructed_runner(shapes.config_of(options.shape), 8 * chunk, device, chunk)
    prompts, vocab_size = Prompts(runner, options.graphs, chunk), runner.model.config.vocab_size
    axes, keeps_state = runner.model.config.rope.axes, runner.pool.state_bytes > 0
    node = MeasuredNode(chunk, 2 * chunk, vocab_size, PAGE, device, axes, keeps_state)
    measured = measure_forwards(prompts.forward, NoDraft(), node)
    former, *_, current = POLICIES
    rows: list[Row] = []
    for rate in options.rates:
        for policy in (former, current):
            curve = CostCurve(prefill_token_buckets(chunk), measured.by_tokens, 1, measured.context_ms)
            times = ForwardTimes(curve, learns=True)
            coming = arrivals(MIXES[options.mix], rate, options.seconds, 0)
            waits = Run(prompts, POLICIES[policy], times).run(coming)
            rows.append(summary(Row(options.mix, rate, policy, [], [], [], []), np.asarray(waits)))
            real, predicted = times.measured_seconds, times.predicted_seconds
            print(
                f"{rows[-1]}\n  forwards {real:.2f} s, predicted {predicted:.2f}, step {curve.step}",
                flush=True,
            )
    if options.json is not None:
        found = {"environment": describe(), "curve": asdict(measured), "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
