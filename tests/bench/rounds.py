"""Speculative rounds and plain decode steps of the engine, without HTTP, processes and transfer.

    python -m tests.bench.rounds [--shape qwen3.5-35b-a3b] [--algorithm mtp] [--acceptance 0.7] [--batch 1 4 16 32 64]
        [--length 1024] [--long 0] [--json FILE]
    python -m tests.bench.rounds --model DIR --draft DIR --device cpu --length 64

`--shape` is a published model or a directory with config.json; its weights are constructed on the device (`shapes.py`).
With `--long 32768` the first prompt of each batch has so many tokens instead of `--length`.
Milliseconds are wall-clock time per round with one round in flight, as in a node; phases are device time between
events. The floor is, phase by phase, the larger of bytes (weights of every forward, of experts only those that its
tokens use; KV that its attention reads; states, read and written) over the copy bandwidth and matrix operations over
the matrix rate, both measured in the same run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from common.engine.models.eagle import Eagle3Head
from common.kv_cache.kv_values import AS_COMPUTED, KvValues
from decode_node.planner import step_plan
from decode_node.request import DecodeRequest
from decode_node.speculative.step import SpeculativeStep
from decode_node.step import DecodeSteps
from decode_node.step_plan import StepPlan
from decode_node.step_result import Launched
from deploy.tiny_models.constructed_head import Drafting
from tests.bench import bench_ranks
from tests.bench.drafted_engine import PAGE, Engine, random_prompts
from tests.bench.environment import describe
from tests.bench.floors import Ceilings, UsedExperts, weights_of
from tests.bench.shapes import EAGLE3, KV_DTYPES, LLAMA, LLAMAS, MTP, SHAPES, Pair, config_of, loaded, pair

WARM_UP = 4


@dataclass(frozen=True, slots=True)
class Row:
    """The result for one batch size."""

    batch: int
    length: int  # prompt tokens
    more: int  # tokens of the first prompt besides those
    round_ms: float
    draft_ms: float
    verify_ms: float
    extend_ms: float
    floor_ms: float
    accept_length: float  # tokens per round and request
    tokens_per_s: float
    plain_ms: float
    plain_floor_ms: float
    same_text: float  # share of requests whose two texts agree; below 1 only if logits almost tie
    experts: float = 0.0  # that the target reads in one verification, over all layers
    plain_experts: float = 0.0  # and in one plain step


class Marks:
    """Events around the phases of rounds; a CPU has none."""

    def __init__(self, device: torch.device) -> None:
        self._on = device.type == "cuda"
        self._pairs: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {}

    def around(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        if not self._on:
            return call

        def timed(*args: Any) -> Any:
            pair = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            pair[0].record()
            result = call(*args)
            pair[1].record()
            self._pairs.setdefault(name, []).append(pair)
            return result

        return timed

    def median_ms(self, name: str) -> float:
        """Return the median of the rounds since the last call."""
        times = [start.elapsed_time(stop) for start, stop in self._pairs.pop(name, [])]
        return statistics.median(times) if times else 0.0


class TimedVerify:
    """A verify phase between two events."""

    def __init__(self, verify: Any, marks: Marks) -> None:
        self._verify = verify
        self._call = marks.around("verify", verify)

    def __call__(self, *args: Any) -> Any:
        return self._call(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._verify, name)


def watch(step: SpeculativeStep) -> Marks:
    """Add events around the phases of `step`."""
    marks, drafter = Marks(step.device), step.drafter
    drafter.propose = marks.around("draft", drafter.propose)  # type: ignore[method-assign]
    drafter.draft_extend = marks.around("extend", drafter.draft_extend)  # type: ignore[method-assign]
    step.verify = TimedVerify(step.verify, marks)  # type: ignore[assignment]
    return marks


def run(steps: DecodeSteps, requests: Sequence[DecodeRequest], rounds: int) -> tuple[float, float]:
    """Return (wall-clock ms per step, tokens per step and request). Each step is launched before the last is read."""
    device = torch.cuda.is_available()
    unread: list[tuple[StepPlan, Launched]] = []
    most = steps.rules.tokens_per_step
    drawn, begin = 0, 0.0

    def read() -> int:
        plan, launched = unread.pop(0)
        launched.completion.wait()
        result, accepted = launched.read(), []
        for request, row in zip(requests, result.rows, strict=True):
            request.step_read(most, len(row.tokens))
            known = [token.id for token in row.tokens if token is not None]
            assert len(known) == len(row.tokens), "logits that are not finite"
            request.output += known
            accepted.append(len(known) - 1)
        steps.rules.widths.observe(len(requests), plan.width, accepted, result.seconds)
        return sum(accepted) + len(requests)

    for index in range(WARM_UP + rounds):
        if index == WARM_UP:
            while unread:
                read()
            if device:
                torch.cuda.synchronize()
            begin = time.perf_counter()
        plan = step_plan(requests, steps.rules, index)
        unread.append((plan, steps.by_width[plan.width].launch(plan)))
        for request in requests:
            request.step_launched(most)
        if len(unread) > 1:
            drawn += read() * (index >= WARM_UP)
    while unread:
        drawn += read()
    spent = time.perf_counter() - begin
    return 1e3 * spent / rounds, drawn / rounds / len(requests)


@dataclass(frozen=True, slots=True)
class Used:
    """Experts that one forward reads, over all layers; 0 for a model without experts."""

    verify: float = 0.0
    plain: float = 0.0
    draft: float = 0.0
    extend: float = 0.0


def floors(
    engine: Engine, ceilings: Ceilings | None, used: Used, batch: int, tokens: int
) -> tuple[float, float]:
    """Return the floors (round, plain step) in ms of so many prompt tokens in all; 0 without ceilings."""
    if ceilings is None:
        return 0.0, 0.0
    nodes, drafts = engine.steps + 1, tokens * engine.draft_pool.page_bytes / PAGE
    moved = tokens * engine.pool.page_bytes / PAGE + 2 * batch * engine.pool.state_bytes
    head, weights = engine.draft_runner.head, weights_of(engine.pair.model)
    assert isinstance(head, nn.Module)
    # An EAGLE-3 head projects only the target's hidden states.
    once: list[nn.Module] = [head.fc] if isinstance(head, Eagle3Head) else []
    verify = ceilings.ms(weights, used.verify, moved, batch * nodes)
    draft = ceilings.ms(weights_of(head, once), used.draft, drafts, batch)
    extend = ceilings.ms(weights_of(head), used.extend, drafts, batch * nodes)
    plain = ceilings.ms(weights, used.plain, moved, batch)
    return verify + (engine.steps - 1) * draft + extend, plain


class Comparison:
    """A speculative and a plain step over one engine, both captured."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._ceilings = Ceilings.measure(engine.device)
        algorithm = engine.pair.draft.algorithm
        self._speculative, self._plain = engine.step(algorithm), engine.step("none")
        self._eager = engine.step(algorithm, "none"), engine.step("none", "none")
        (round_step,) = self._speculative.by_width.values()
        assert isinstance(round_step, SpeculativeStep)
        self._marks = watch(round_step)

    def measure(self, batch: int, length: int, rounds: int, more: int = 0) -> Row:
        """Run both steps over the same prompts, the first of which has `more` tokens more than the others."""
        engine, prompts = self._engine, random_prompts(self._engine.pair, batch, length, batch, more)
        texts, times = [], []
        for step in (self._speculative, self._plain):
            requests, result = self._run(step, prompts, rounds, step is self._speculative)
            times.append(result)
            texts.append([request.output for request in requests])
        same = [drafted[: len(known)] == known[: len(drafted)] for drafted, known in zip(*texts)]
        (round_ms, accepted), (plain_ms, _) = times
        used = self._used(prompts)
        floor, plain_floor = floors(engine, self._ceilings, used, batch, batch * length + more)
        return Row(
            batch=batch,
            length=length,
            more=more,
            round_ms=round_ms,
            draft_ms=self._marks.median_ms("draft"),
            verify_ms=self._marks.median_ms("verify"),
            extend_ms=self._marks.median_ms("extend"),
            floor_ms=floor,
            accept_length=accepted,
            tokens_per_s=1e3 * batch * accepted / round_ms,
            plain_ms=plain_ms,
            plain_floor_ms=plain_floor,
            same_text=sum(same) / len(same),
            experts=used.verify,
            plain_experts=used.plain,
        )

    def _run(
        self, step: DecodeSteps, prompts: Sequence[list[int]], rounds: int, drafting: bool
    ) -> tuple[list[DecodeRequest], tuple[float, float]]:
        """Prefill `prompts`, and return their requests at the end and what `run` returns."""
        most = (WARM_UP + rounds + 1) * step.rules.tokens_per_step + 1
        requests = self._engine.start(prompts, most, drafting)
        result = run(step, requests, rounds)
        self._engine.end(requests)
        return requests, result

    def _used(self, prompts: Sequence[list[int]]) -> Used:
        """Count experts in a few eager rounds and steps."""
        engine, batch = self._engine, len(prompts)
        if engine.pair.model.config.experts is None:
            return Used()
        head, nodes = engine.draft_runner.head, engine.steps + 1
        assert isinstance(head, nn.Module)
        rounds, steps = self._eager
        with UsedExperts(engine.pair.model) as target, UsedExperts(head) as draft:
            self._run(rounds, prompts, 1, drafting=True)
        with UsedExperts(engine.pair.model) as plain:
            self._run(steps, prompts, 1, drafting=False)
        return Used(
            verify=target.per_forward(batch * nodes),
            plain=plain.per_forward(batch),
            draft=draft.per_forward(batch),
            extend=draft.per_forward(batch * nodes),
        )


HEAD = (
    f"{'batch':>5} {'round ms':>9} {'floor':>6} {'draft':>6} {'verify':>7} {'extend':>7} {'accept':>7} "
    f"{'tok/s':>8} {'plain ms':>9} {'floor':>6} {'same':>5} {'experts':>8}"
)


def line(row: Row) -> str:
    return (
        f"{row.batch:5d} {row.round_ms:9.3f} {row.floor_ms:6.2f} {row.draft_ms:6.3f} {row.verify_ms:7.3f} "
        f"{row.extend_ms:7.3f} {row.accept_length:7.2f} {row.tokens_per_s:8.0f} {row.plain_ms:9.3f} "
        f"{row.plain_floor_ms:6.2f} {row.same_text:5.2f} {row.experts:8.0f}"
    )


def bench(
    models: Pair,
    batches: Sequence[int],
    length: int,
    steps: int,
    rounds: int,
    graphs: str = "auto",
    kv: KvValues = AS_COMPUTED,
    more: int = 0,
) -> Iterator[Row]:
    """Yield one row per batch size. The first prompt of each batch has `more` tokens more than `length`."""
    most = length + more + (WARM_UP + rounds + 2) * (steps + 1) + 1
    comparison = Comparison(Engine(models, max(batches), most, steps, graphs, kv=kv, shorter=more))
    for batch in batches:
        yield comparison.measure(batch, length, rounds, more)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shape", default=LLAMA, help=f"{', '.join((*LLAMAS, *SHAPES))} or a directory")
    parser.add_argument("--algorithm", choices=(EAGLE3, MTP), default=EAGLE3, help="of the constructed draft")
    parser.add_argument("--acceptance", type=float, default=0.7, help="of the constructed draft")
    parser.add_argument("--seed", type=int, default=0, help="of the constructed weights")
    parser.add_argument("--model", type=Path, help="directory of a target to load instead")
    parser.add_argument("--draft", type=Path, help="directory of its draft")
    parser.add_argument(
        "--quantization", default="none", help="of constructed weights, as model.quantization"
    )
    parser.add_argument(
        "--draft-quantization",
        default="none",
        help="as speculation.draft_quantization, of a constructed EAGLE-3 head",
    )
    parser.add_argument("--kv-dtype", choices=KV_DTYPES, default="auto", help="as kv.dtype")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 16, 32, 64])
    parser.add_argument("--length", type=int, default=1024, help="prompt tokens")
    parser.add_argument("--long", type=int, default=0, help="tokens of each batch's first prompt")
    parser.add_argument("--steps", type=int, default=3, help="drafts of a round")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--graphs", choices=("auto", "full", "none"), default="auto")
    parser.add_argument("--json", type=Path)
    bench_ranks.add_arguments(parser)
    options = parser.parse_args()
    if (options.model is None) != (options.draft is None):
        parser.error("--model and --draft go together")
    if 0 < options.long < options.length:
        parser.error("--long is less than --length")
    formats = options.quantization, options.draft_quantization
    if options.model is not None and formats != ("none", "none"):
        parser.error(
            "loaded checkpoints keep their formats: leave out --quantization and --draft-quantization"
        )
    if options.algorithm == MTP and options.draft_quantization != "none":
        parser.error("MTP modules have the format of their target: leave out --draft-quantization")
    if options.model is not None and (options.ranks > 1 or options.share is not None):
        parser.error("several ranks need a constructed model: leave out --model and --draft")
    with bench_ranks.joined("tests.bench.rounds", options) as here:
        measure(options, here)


def measure(options: argparse.Namespace, here: bench_ranks.Here) -> None:
    """Measure on one rank; all ranks do the same at the same time."""
    device = here.device
    formats = options.quantization, options.draft_quantization
    began = time.perf_counter()
    if options.model is None:
        drafting = Drafting(options.acceptance)
        raw = config_of(options.shape)
        models = pair(
            raw, options.algorithm, drafting, options.steps, options.seed, device, *formats, here.ranks
        )
    else:
        models = loaded(options.model, options.draft, options.steps, device)
    if device.type == "cuda":
        torch.cuda.synchronize()
    built = time.perf_counter() - began
    print(f"models made in {built:.1f} s", flush=True)
    print(HEAD)
    report = {**describe(), "options": vars(options), "build_s": round(built, 2)}
    rows = []
    sizes = options.length, options.steps, options.rounds
    more = max(options.long - options.length, 0)
    for row in bench(models, options.batch, *sizes, options.graphs, KV_DTYPES[options.kv_dtype], more):
        print(line(row), flush=True)
        rows.append(asdict(row))
        if options.json and here.first:  # after every row, so that an interrupted run keeps its results
            options.json.write_text(json.dumps({**report, "rows": rows}, indent=1, default=str) + "\n")


if __name__ == "__main__":
    main()
