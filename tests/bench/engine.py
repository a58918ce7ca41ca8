"""The steps of both nodes without sockets: prompts to first tokens, batches to next tokens, graphs on and off.

    python -m tests.bench.engine [--shape qwen3-30b-a3b] [--json FILE] [--prompts 64 ... 8192] [--batches 1 4 ...]
        [--context 1024] [--prompt-graphs breakable piecewise-eager piecewise-inductor none] [--cached 0]
        [--beside 0]

`--cached` is the number of tokens before each prompt whose keys and values the pages already hold. With `--beside 2000`
a forward also computes a prompt of 2,000 tokens with nothing cached, and the times are those of both. With
`--long 32768` the first request of each batch has so many tokens of context instead of `--context`.

With `--ranks 2` the model is divided over two GPUs as in a node; weights, bytes and floors are those of one of them,
and a floor contains no all-reduce. `--share 2` measures the share of one of them on one GPU (`bench_ranks.py`).

The model is a published shape or a directory with config.json, made on the device (`shapes.py`). Times are host time,
from the call to tokens that Python can read; `device` is from the first to the last kernel of a step, and the
difference is host overhead. Floors are measured in the same run: for prefill, only the matrix products of the layers in
one graph, and for experts the larger of the bytes that are used and the operations; for decode, weights, used experts,
KV and states divided by the copy bandwidth.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
import torch

from common.engine.attention.prompt_attention import PromptAttention
from common.engine.attention.step_attention import StepAttention
from common.engine.forward.batch import CaptureHiddenMode
from common.engine.forward.model_runner import ModelRunner
from common.engine.forward.rotary_places import OneAxis
from common.engine.graphs import node_graphs
from common.engine.graphs.ladders import prefill_token_buckets
from common.engine.graphs.rules import PhaseSwitch
from common.engine.layers.ranks import ONE_RANK, Ranks
from common.engine.sampling.logit_adjustments import AdjustmentRows
from common.engine.state.relay_state import RelayState
from common.engine.state.state_rows import WindowShape
from common.kv_cache.kv_values import AS_COMPUTED, KvValues
from common.kv_cache.layer_kinds import window_widths
from common.kv_cache.page_space import PageSpace, as_keys
from common.kv_cache.radix_cache import NoPrefixCache
from common.messages.generation import ImageSpan, SamplingParams
from common.messages.identity import NodeRef
from common.node.completion import completion_for
from common.observability.logs import Log
from decode_node.graphs import step_graphs
from decode_node.page_table import PageTable
from decode_node.planner import step_plan
from decode_node.request import DecodeRequest
from decode_node.step import AutoregressiveStep
from decode_node.step_result import Launched
from decode_node.step_rules import StepRules
from prefill_node.draft import NoDraft
from prefill_node.graphs import prompt_graphs
from prefill_node.graphs.backends.compiled_body import CompiledBodies
from prefill_node.planner import prompt_plan
from prefill_node.request import PrefillRequest
from prefill_node.scheduler import Chunk, fewest_keys_first
from prefill_node.step import PrefillStep
from prefill_node.step_rules import PromptRules
from prefill_node.vision import PromptEmbeds, TextEmbeds
from tests.bench import bench_ranks, shapes
from tests.bench.environment import describe
from tests.bench.floors import Floors, UsedExperts
from tests.bench.timing import wake
from tests.fakes.pools import model_pool

PAGE = 16
GREEDY = SamplingParams(max_tokens=1 << 20, temperature=0.0)
NOBODY = NodeRef(name="bench", role="prefill", incarnation="")
LOG = Log("bench")
WARM_UP = 3
MAX_CODE = 0x38  # the code of 1.0
PROMPT_GRAPHS = ["breakable", "piecewise-eager", "piecewise-inductor", "none"]


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement. `size`: prompt tokens, or requests of a step."""

    what: str
    graphs: str
    size: int
    ms: float  # median
    ms_p90: float
    device_ms: float
    launch_ms: float  # until the host has launched everything
    floor_ms: float
    experts: float = 0.0  # that one forward reads, over all layers


def constructed_runner(
    raw: Mapping[str, Any],
    pool_tokens: int,
    device: torch.device,
    chunk: int,
    slots: int = 2,
    quantization: str = "none",
    kv: KvValues = AS_COMPUTED,
    ranks: Ranks = ONE_RANK,
) -> ModelRunner:
    """Construct the model of a config.json on its device (shapes.py), with a pool for prompts.

    Args:
        slots: of per-request state, including slot 0; for models that keep one.
        quantization: as `model.quantization`.
        kv: how keys and values are stored.
        ranks: says which share of the model is constructed.
    """
    model = shapes.target(raw, 0, device, quantization, ranks)
    config, placement = model.config, model.placement
    pool = model_pool(config, PAGE, pool_tokens // PAGE + 1, placement, slots, kv)
    buckets = prefill_token_buckets(chunk)
    # Reading zeros takes as long but draws less power.
    eight_bits = kv.dtype is not None
    pool.storage.random_(0, MAX_CODE) if eight_bits else pool.storage.view(placement.dtype).normal_()
    for layer in range(config.num_layers):
        for plane in pool.planes(layer).values():
            plane[0].zero_()
    return ModelRunner(
        model, pool, PromptAttention(pool, config.sliding_windows, buckets, config.attention_scale)
    )


# ms: median, 90th percentile, medians of the device and of the launch
Figures = tuple[float, float, float, float]


class Clock:
    """Measures steps: host time and device time."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._spans: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._launches: list[float] = []
        self.times: list[float] = []

    @contextmanager
    def launching(self) -> Iterator[None]:
        began = time.perf_counter()
        if not self._cuda:
            yield
            self._launches.append(time.perf_counter() - began)
            return
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        yield
        self._launches.append(time.perf_counter() - began)
        stop.record()
        self._spans.append((start, stop))

    def result(self, warmup: int) -> Figures:
        times = sorted(self.times[warmup:])
        device = [1e-3 * start.elapsed_time(stop) for start, stop in self._spans[warmup:]] or [0.0]
        return (
            1e3 * statistics.median(times),
            1e3 * times[int(0.9 * len(times))],
            1e3 * statistics.median(device),
            1e3 * statistics.median(self._launches[warmup:]),
        )


class PrefillSteps:
    """Prompts one at a time, including the draw of their first tokens."""

    def __init__(
        self,
        runner: ModelRunner,
        wanted: str,
        chunk: int,
        embeds: PromptEmbeds | None = None,
        cached: int = 0,
        beside: int = 0,
    ) -> None:
        """Capture the graphs.

        Args:
            wanted: the value of `prefill.graphs`, and after a hyphen the compiler of piecewise graphs.
            cached: tokens before each prompt whose keys and values the pages hold.
            beside: tokens of a second prompt in each forward; 0: there is none.
        """
        backend, _, compiler = wanted.partition("-")
        bodies = CompiledBodies(compiler or "eager")
        attention, model = runner.attention, runner.model
        assert isinstance(attention, PromptAttention)
        heads = model.config.num_heads // model.placement.shard.size
        on_device = attention.tokens_on_device(heads, model.placement.dtype, chunk)
        graphs = prompt_graphs.prefill_graphs(
            runner, PhaseSwitch(backend), chunk, 64, CaptureHiddenMode.NULL, bodies, on_device
        )
        node_graphs.capture(graphs, LOG)
        self.told = node_graphs.report(graphs)
        self._device = device = runner.pool.device
        adjustments = AdjustmentRows.allocate(2, runner.model.config.vocab_size, device)
        rest = adjustments, OneAxis(), PAGE, completion_for(device, one_behind=False)
        self._step = PrefillStep(graphs.forward, embeds or TextEmbeds(), NoDraft(), *rest)
        self._space = PageSpace(
            PAGE, runner.pool.num_pages, NoPrefixCache(), num_slots=runner.pool.layout.num_slots
        )
        self._ids = 20, runner.model.config.vocab_size
        self._rng = np.random.default_rng(1)
        self._cached, self._beside = cached, beside

    def measure(
        self, tokens: int, repeats: int, images: Callable[[], tuple[ImageSpan, ...]] = tuple
    ) -> Figures:
        """Measure prompts of so many tokens with `images` in each, which `embeds` keeps under key 0."""
        clock = Clock(self._device)
        for _ in range(repeats + WARM_UP):
            chunks = [self._chunk(0, self._cached, tokens, images())]
            if self._beside:
                chunks = fewest_keys_first([*chunks, self._chunk(1, 0, self._beside)])
            started = time.perf_counter()
            with clock.launching():
                launched = self._step.launch(prompt_plan(chunks, PAGE, PromptRules(), 1))
            launched.completion.wait()
            launched.read()
            clock.times.append(time.perf_counter() - started)
            for chunk in chunks:
                assert chunk.request.lease is not None
                chunk.request.lease.release()
        return clock.result(WARM_UP)

    def _chunk(self, slot: int, cached: int, tokens: int, images: tuple[ImageSpan, ...] = ()) -> Chunk:
        """Return the only chunk of a new prompt, which has pages."""
        keys = self._rng.integers(*self._ids, cached + tokens).astype(np.int64)
        request = PrefillRequest(slot, "", keys, 0, GREEDY, "", 0.0, images=images)
        request.lease = self._space.lease(request.keys, self._space.pages_for(cached + tokens), 0)
        assert request.lease is not None
        return Chunk(request, cached, tokens)


def pages_of(tokens: int) -> int:
    return -(-tokens // PAGE)


def contexts_of(most: int, options: argparse.Namespace) -> list[int]:
    """Return the tokens of each request before the first step."""
    return [options.long or options.context, *[options.context] * (most - 1)]


class DecodeSteps:
    """Batches of up to `most` requests; each step is launched before the previous one is read, as in the node."""

    def __init__(self, runner: ModelRunner, wanted: str, contexts: Sequence[int], steps: int) -> None:
        self._device = device = runner.pool.device
        most, longest = len(contexts), max(contexts) + steps + 8
        pages_each = pages_of(longest)
        table = PageTable(most, pages_each, device)
        config = runner.model.config
        placement = runner.model.placement
        window = WindowShape(window_widths(config, placement.shard), 1, placement.dtype)
        self._relay = RelayState.allocate(most, config.vocab_size, device, window=window)
        graphs = step_graphs.decode_graphs(runner, self._relay, table, PhaseSwitch(wanted), most, longest)
        node_graphs.capture(graphs, LOG)
        self.told = node_graphs.report(graphs)
        completion = completion_for(device, one_behind=True)
        self._step = AutoregressiveStep(graphs.forward, device, completion)
        slots = most + 1 if runner.pool.state_bytes else 0
        each = [pages_of(context + steps + 8) for context in contexts]
        space = PageSpace(PAGE, 1 + sum(each), NoPrefixCache(), num_slots=slots)
        self._requests = []
        for index, context in enumerate(contexts):
            request = DecodeRequest(0, "", [0] * context, 0, GREEDY, NOBODY, 0.0, 0.0, row=index + 1)
            request.lease = space.lease(as_keys(request.prompt), each[index], 0)
            assert request.lease is not None
            table.write([(request.row, logical, page) for logical, page in enumerate(request.lease.pages)])
            self._requests.append(request)

    def measure(self, count: int, repeats: int) -> Figures:
        """Measure steps of `count` requests."""
        requests = self._requests[:count]
        for index, request in enumerate(requests):
            assert request.lease is not None
            text, slot = [*request.prompt, 100 + index], request.lease.slot
            self._relay.write_row(request.row, text, 1, GREEDY, slot=slot)
        rules = StepRules()

        def launch(generation: int) -> Launched:
            return self._step.launch(step_plan(requests, rules, generation))

        clock, before, last = Clock(self._device), launch(0), time.perf_counter()
        for index in range(repeats + WARM_UP):
            with clock.launching():
                ahead = launch(index + 1)
            before.completion.wait()
            before.read()
            now = time.perf_counter()
            clock.times.append(now - last)
            before, last = ahead, now
        before.completion.wait()
        return clock.result(WARM_UP)


def decode_steps(runner: ModelRunner, wanted: str, most: int, options: argparse.Namespace) -> DecodeSteps:
    """Make decode steps over the pool of `runner`, whose attention is that of prompts."""
    config = runner.model.config
    attention = StepAttention(runner.pool, config.sliding_windows, config.attention_scale)
    decoding = ModelRunner(runner.model, runner.pool, attention)
    return DecodeSteps(decoding, wanted, contexts_of(most, options), options.steps)


def count_experts(
    runner: ModelRunner, chunk: int, options: argparse.Namespace
) -> dict[tuple[str, int], float]:
    """Return the experts that forwards read, over all layers, by (what, size)."""
    none = dict.fromkeys(
        [*(("prefill", size) for size in options.prompts), *(("decode", size) for size in options.batches)],
        0.0,
    )
    if runner.model.config.experts is None:
        return none
    makers: list[tuple[str, list[int], Callable[[], Steps]]] = [
        ("prefill", options.prompts, lambda: PrefillSteps(runner, "none", chunk, beside=options.beside)),
        ("decode", options.batches, lambda: decode_steps(runner, "none", max(options.batches), options)),
    ]
    for what, sizes, make in makers:
        for size in sizes:
            steps = make()
            with UsedExperts(runner.model) as used:
                steps.measure(size, 1)
            none[what, size] = used.per_forward(size + options.beside if what == "prefill" else size)
    return none


def driver_mib() -> float:
    """Return the GPU memory that torch does not account for: contexts, modules, instantiated graphs."""
    free, total = torch.cuda.mem_get_info()
    return (total - free - torch.cuda.memory_reserved()) / (1 << 20)


class Steps(Protocol):
    def measure(self, size: int, repeats: int, /) -> Figures: ...


def kernels(steps: Steps, size: int) -> list[tuple[str, float, float]]:
    """Return (kernel, launches per step, microseconds per step), the most expensive first."""
    repeats = 9
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        steps.measure(size, repeats)
    runs = repeats + WARM_UP + isinstance(steps, DecodeSteps)
    found = [
        (event.key, event.count / runs, event.device_time_total / runs) for event in profile.key_averages()
    ]
    return sorted(found, key=lambda kernel: -kernel[2])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--shape", default=shapes.LLAMA, help=f"{', '.join((*shapes.LLAMAS, *shapes.SHAPES))} or a directory"
    )
    parser.add_argument("--quantization", default="none", help="as model.quantization")
    parser.add_argument("--kv-dtype", choices=shapes.KV_DTYPES, default="auto", help="as kv.dtype")
    parser.add_argument("--prompts", type=int, nargs="*", default=[64, 128, 256, 512, 1024, 2048, 4096, 8192])
    parser.add_argument("--cached", type=int, default=0, help="tokens before each prompt")
    parser.add_argument("--beside", type=int, default=0, help="tokens of another prompt in the same forward")
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 4, 16, 32, 64, 128])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument(
        "--long", type=int, help="context of the first request, if it differs from the others'"
    )
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--kernels", type=int, nargs="*", default=[], help="sizes to list the kernels of")
    parser.add_argument("--prompt-graphs", nargs="*", default=PROMPT_GRAPHS, choices=PROMPT_GRAPHS)
    parser.add_argument("--json", type=Path)
    bench_ranks.add_arguments(parser)
    options = parser.parse_args()
    with bench_ranks.joined("tests.bench.engine", options) as here:
        run(options, here)


def run(options: argparse.Namespace, here: bench_ranks.Here) -> None:
    """Measure on one rank; all ranks do the same at the same time."""
    device = here.device
    chunk = max([64, *options.prompts]) + options.beside
    contexts = contexts_of(max([1, *options.batches]), options)
    used_pages = sum(pages_of(context + options.steps + 8) for context in contexts)
    pool_tokens = max(options.cached + chunk + PAGE, used_pages * PAGE) + PAGE
    cuda = device.type == "cuda"
    began = time.perf_counter()
    raw = dict(shapes.config_of(options.shape))
    raw["max_position_embeddings"] = max(
        raw["max_position_embeddings"], options.cached + chunk, max(contexts) + options.steps + 8
    )
    runner = constructed_runner(
        raw,
        pool_tokens,
        device,
        chunk,
        max([1, *options.batches]) + 1,
        options.quantization,
        shapes.KV_DTYPES[options.kv_dtype],
        here.ranks,
    )
    if cuda:
        torch.cuda.synchronize()
    built = time.perf_counter() - began
    print(f"model made in {built:.1f} s", flush=True)
    more = contexts[0] - options.context
    floors = Floors(runner.model, runner.pool, options.context + options.steps / 2, more)
    rows, slowest, captures, environment = [], {}, {}, describe()
    print(
        f"{'':8} {'graphs':>18} {'size':>6} {'ms':>8} {'p90':>8} {'device':>8} {'launch':>8} {'floor':>8} ratio"
    )
    prompts = [("prefill", wanted) for wanted in options.prompt_graphs]
    used_experts = count_experts(runner, chunk, options)
    for what, wanted in (("decode", "full"), ("decode", "none"), *prompts):
        sizes = options.prompts if what == "prefill" else options.batches
        if not sizes:
            continue
        steps: PrefillSteps | DecodeSteps
        before = driver_mib() if cuda else 0.0
        if what == "prefill":
            steps = PrefillSteps(runner, wanted, chunk, cached=options.cached, beside=options.beside)
        else:
            steps = decode_steps(runner, wanted, max(sizes), options)
        told, driver = steps.told, round(driver_mib() - before) if cuda else 0
        captures[f"{what} {wanted}"] = {**msgspec.to_builtins(told), "driver_mib": driver}
        print(
            f"{what:8} {wanted:>18} {told.captured} graphs, {len(told.failed)} failed: capture "
            f"{told.seconds} s, compilation {told.compile_seconds} s, {told.mib} MiB, "
            f"{driver} more of the driver",
            flush=True,
        )
        if cuda:
            wake()
        for size in sizes:
            ms, p90, busy, launch = steps.measure(size, 9 if what == "prefill" else options.steps)
            used = used_experts[what, size]
            floor = (
                floors.prompt(size + options.beside, used) if what == "prefill" else floors.step(size, used)
            )
            rows.append(Row(what, wanted, size, ms, p90, busy, launch, floor, used))
            ratio = f"{ms / floor:5.2f}" if floor else "    -"
            print(
                f"{what:8} {wanted:>18} {size:6d} {ms:8.2f} {p90:8.2f} {busy:8.2f} {launch:8.2f} {floor:8.2f} {ratio}",
                flush=True,
            )
            if size in options.kernels and wanted != "none":
                slowest[f"{what} {wanted} {size}"] = kernels(steps, size)
        del steps  # frees graphs and their memory
        gc.collect()
        if options.json and here.first:  # after every part, so that an interrupted run keeps its results
            report = {
                "environment": environment,
                "options": vars(options),
                "build_s": round(built, 2),
                "ceilings": None if floors.ceilings is None else asdict(floors.ceilings),
                "captures": captures,
                "rows": [asdict(row) for row in rows],
                "kernels": slowest,
            }
            options.json.write_text(json.dumps(report, indent=2, default=str) + "\n")
    for name, table in slowest.items():
        print(
            f"{name}: {sum(us for _, _, us in table):.0f} us in {sum(count for _, count, _ in table):.0f} kernels"
        )
        for kernel, count, us in table[:14]:
            print(f"  {us:9.1f} us {count:7.1f} x {kernel[:90]}")


if __name__ == "__main__":
    main()
