"""What the host adds between the forwards of a prefill node, and what cutting a long prompt costs.

    python -m tests.bench.prompt_gaps [--shape DIRECTORY] [--prompts 512 1024] [--chunk 8192] [--json FILE]

Prints the cost curve that a node measures at its start. Then prompts of one size run through a prefill step one after
another: `alone` launches each after the previous one was read, `behind` before that. `gap` is the time per prompt that
the device does not compute, `host` the time of the launching call. Last, prompts of the largest size in chunks.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from common.engine.forward.batch import CaptureHiddenMode
from common.engine.forward.model_runner import ModelRunner
from common.engine.forward.rotary_places import OneAxis
from common.engine.graphs import node_graphs
from common.engine.graphs.ladders import prefill_token_buckets
from common.engine.graphs.rules import PhaseSwitch
from common.engine.sampling.logit_adjustments import AdjustmentRows
from common.kv_cache.page_space import PageSpace
from common.kv_cache.radix_cache import NoPrefixCache
from common.node.completion import completion_for
from prefill_node.cost_curve import CostCurve
from prefill_node.draft import NoDraft
from prefill_node.graphs import prompt_graphs
from prefill_node.measure import MeasuredNode, measure_forwards
from prefill_node.planner import prompt_plan
from prefill_node.request import PrefillRequest
from prefill_node.scheduler import Chunk
from prefill_node.step import LaunchedPrefill, PrefillStep
from prefill_node.step_rules import PromptRules
from prefill_node.vision import TextEmbeds
from tests.bench import shapes
from tests.bench.engine import GREEDY, LOG, PAGE, constructed_runner
from tests.bench.environment import describe

AHEAD = {"alone": 0, "behind": 1}  # launches that are not read when the next one begins


@dataclass(frozen=True, slots=True)
class Gaps:
    """Medians in milliseconds of prompts of one size."""

    tokens: int
    launched: str
    each: float  # from one first token to the next
    device: float
    gap: float
    host: float


class Prompts:
    """Runs prompts of random tokens through one prefill step."""

    def __init__(self, runner: ModelRunner, graphs: str, chunk: int) -> None:
        made = prompt_graphs.prefill_graphs(runner, PhaseSwitch(graphs), chunk, 64, CaptureHiddenMode.NULL)
        node_graphs.capture(made, LOG)
        self.forward, self.device = made.forward, runner.pool.device
        self._vocab = runner.model.config.vocab_size
        rest = AdjustmentRows.allocate(64, self._vocab, self.device), OneAxis(), PAGE
        completion = completion_for(self.device, one_behind=False)
        self.step = PrefillStep(made.forward, TextEmbeds(), NoDraft(), *rest, completion)
        slots = runner.pool.layout.num_slots
        self._space = PageSpace(PAGE, runner.pool.num_pages, NoPrefixCache(), num_slots=slots)
        self._rng = np.random.default_rng(1)

    def request(self, tokens: int) -> PrefillRequest:
        """Return a prompt that has its pages."""
        request = PrefillRequest(0, "", np.empty(tokens, dtype=np.int64), 0, GREEDY, "", 0.0)
        assert self.admit(request)
        return request

    def admit(self, request: PrefillRequest) -> bool:
        """Give a prompt pages and random tokens, if there are enough pages."""
        tokens = request.num_tokens
        request.keys = self._rng.integers(20, self._vocab, tokens).astype(np.int64)
        request.lease = self._space.lease(request.keys, self._space.pages_for(tokens), 0)
        return request.lease is not None

    def launch(self, request: PrefillRequest, start: int, length: int) -> LaunchedPrefill:
        return self.step.launch(prompt_plan([Chunk(request, start, length)], PAGE, PromptRules(), 1))

    def gaps(self, tokens: int, launched: str, repeats: int) -> Gaps:
        """Run `repeats` prompts, and some before them that do not count."""
        ahead, ends, hosts, devices = deque[tuple[PrefillRequest, LaunchedPrefill]](), [], [], []
        requests = [self.request(tokens) for _ in range(AHEAD[launched] + 1)]
        for _ in range(repeats + 3):
            request = requests[0]
            requests.append(requests.pop(0))
            began = time.perf_counter()
            ahead.append((request, self.launch(request, 0, tokens)))
            hosts.append(time.perf_counter() - began)
            if len(ahead) > AHEAD[launched]:
                _, oldest = ahead.popleft()
                oldest.completion.wait()
                oldest.read()
                ends.append(time.perf_counter())
                devices.append(1e3 * oldest.watch.seconds()[0])
        for _, rest in ahead:
            rest.completion.wait()
        for each in requests:
            assert each.lease is not None
            each.lease.release()
        spans = [1e3 * (after - before) for before, after in itertools.pairwise(ends[2:])]
        each_ms, device = statistics.median(spans), statistics.median(devices[3:])
        gap, host = each_ms - device, 1e3 * statistics.median(hosts[3:])
        return Gaps(tokens, launched, *(round(value, 3) for value in (each_ms, device, gap, host)))

    def in_chunks(self, tokens: int, chunk: int) -> float:
        """Return the milliseconds of one prompt in chunks, each launched before the previous one is read."""
        times = []
        for _ in range(4):
            request = self.request(tokens)
            began = time.perf_counter()
            for start in range(0, tokens, chunk):
                launched = self.launch(request, start, min(chunk, tokens - start))
            launched.completion.wait()
            times.append(time.perf_counter() - began)
            assert request.lease is not None
            request.lease.release()
        return round(1e3 * statistics.median(times[1:]), 2)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default=shapes.LLAMA, help="a shape of tests.bench.shapes, or a directory")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--graphs", default="breakable")
    parser.add_argument("--prompts", type=int, nargs="+", default=[64, 512, 1024, 2048])
    parser.add_argument("--chunk", type=int, default=8192, help="tokens of the largest forward")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device, chunk = torch.device(options.device), options.chunk
    runner = constructed_runner(shapes.config_of(options.shape), 4 * chunk, device, chunk)
    prompts = Prompts(runner, options.graphs, chunk)
    began = time.perf_counter()
    config, keeps_state = runner.model.config, runner.pool.state_bytes > 0
    node = MeasuredNode(chunk, 2 * chunk, config.vocab_size, PAGE, device, config.rope.axes, keeps_state)
    times = measure_forwards(prompts.forward, NoDraft(), node)
    took = time.perf_counter() - began
    curve = CostCurve(prefill_token_buckets(chunk), times.by_tokens, context_ms=times.context_ms)
    shown = {tokens: round(ms, 2) for tokens, ms in times.by_tokens.items()}
    print(
        f"measured in {took:.2f} s, step {curve.step}, context {1e6 * times.context_ms:.3f} ns: {shown}",
        flush=True,
    )
    rows = [prompts.gaps(size, launched, options.repeats) for size in options.prompts for launched in AHEAD]
    for row in rows:
        print(
            f"{row.tokens:>6} {row.launched:>7}: each {row.each:.2f} device {row.device:.2f} gap {row.gap:.2f} host "
            f"{row.host:.2f}",
            flush=True,
        )
    cuts = {
        size: prompts.in_chunks(chunk, size)
        for size in (chunk // 16, chunk // 8, chunk // 4, chunk // 2, chunk)
    }
    print(f"{chunk} tokens in chunks: {cuts}; predicted {curve.prompt_ms(chunk):.1f}", flush=True)
    if options.json is not None:
        found = {
            "environment": describe(),
            "curve": asdict(times),
            "step": curve.step,
            "gaps": [asdict(row) for row in rows],
            "chunks": cuts,
        }
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
