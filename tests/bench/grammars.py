"""What grammars cost in steps of plain decoding, and what forced tokens gain; without HTTP, processes and transfer.

    python -m tests.bench.grammars [--batch 1 4 16 32 64] [--steps 200] [--json FILE]
    python -m tests.bench.grammars --small --device cpu --length 32
    python -m tests.bench.grammars --model DIR --draft DIR --device cpu --length 64
    python -m tests.bench.grammars --drafter eagle3 [--drafts 3]

Three runs per batch size, of the node's own steps: free requests with one step in flight, constrained requests that
decode one token per step, and constrained requests whose forced tokens are verified as drafts. All constrained requests
answer with a list of records as compact JSON. Milliseconds are wall-clock time per step. Of constrained steps, `follow`
is the host's time between two steps (reading tokens, following the grammar, forced tokens), and `masks` the time to
compute masks, which a GPU's forward hides.

With `--drafter eagle3` rounds of that drafter are measured instead, two runs per batch size: free requests, whose
rounds overlap, and constrained ones. A constructed head drafts half of the tokens correctly in both.

A constructed target says nothing sensible, so the share of forced tokens in its records is that of the schema: names
and strings have random lengths up to their bounds. A target of 128k tokens gets a constructed tokenizer: byte pairs of
random merges.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from llguidance import LLMatcher
from msgspec import to_builtins
from msgspec.structs import replace

from common.grammar import GrammarCompiler
from common.speculation.forced_widths import DRAFTED_WIDTHS, PLAIN_WIDTHS
from decode_node.grammar_masks import step_masks
from decode_node.masked_step import MaskedStep
from decode_node.planner import step_plan
from decode_node.request import DecodeRequest, Emission
from decode_node.step import DecodeSteps
from decode_node.step_plan import StepPlan
from decode_node.step_result import Launched
from deploy.tiny_models.constructed_head import Drafting
from deploy.tiny_models.constructed_shape import Shape
from tests.bench.drafted_engine import Engine, random_prompts
from tests.bench.environment import describe
from tests.bench.shapes import EAGLE3, LLAMA, Pair, config_of, loaded, pair
from tests.fakes.tiny_grammar import byte_level_json

WARM_UP = 8
SMALL = Shape(
    vocab=128_256,
    hidden=256,
    layers=3,
    heads=4,
    kv_heads=2,
    head_dim=64,
    inter=256,
    max_positions=4096,
    draft_vocab=1024,
)
SCHEMA = {
    "type": "array",
    "minItems": 1000,
    "items": {
        "type": "object",
        "properties": {
            "product_name": {"type": "string", "maxLength": 24},
            "quantity": {"type": "integer", "minimum": 0, "maximum": 9999},
            "available": {"type": "boolean"},
            "category": {"enum": ["electronics", "garden", "kitchen", "stationery"]},
            "warehouse_code": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4}$"},
        },
        "required": ["product_name", "quantity", "available", "category", "warehouse_code"],
        "additionalProperties": False,
    },
}


@dataclass(frozen=True, slots=True)
class Row:
    """The results for one batch size."""

    batch: int
    free_ms: float
    masked_ms: float
    forced_ms: float
    masked_follow_ms: float
    masked_masks_ms: float
    forced_follow_ms: float
    forced_masks_ms: float
    tokens_per_step: float  # per request, with forced tokens
    free_tokens_per_s: float
    masked_tokens_per_s: float
    forced_tokens_per_s: float


@dataclass(frozen=True, slots=True)
class DraftedRow:
    """The results of rounds of a drafter for one batch size."""

    batch: int
    free_ms: float
    json_ms: float
    json_follow_ms: float
    json_masks_ms: float
    free_tokens_per_step: float  # per request
    json_tokens_per_step: float
    free_tokens_per_s: float
    json_tokens_per_s: float


@dataclass(slots=True)
class Times:
    """Seconds of each step."""

    follow: list[float] = field(default_factory=list)
    masks: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)
    tokens: int = 0

    def ms(self, values: Sequence[float]) -> float:
        return 1e3 * statistics.median(values[WARM_UP:])

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / sum(self.steps[WARM_UP:])


def constructed_tokenizer(vocab: int) -> str:
    """Return a tokenizer.json of `vocab` tokens: bytes, then merges of two random earlier tokens, short ones first."""
    draw = random.Random(0)
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in printable]
    pieces = [chr(byte) for byte in printable] + [chr(256 + place) for place in range(len(rest))]
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    common = letters + [letter.upper() for letter in letters] + list('0123456789_-"{}[]:,.') + ["\u0120"]
    known, merges, grown = set(pieces), [], list(common)
    while len(pieces) < vocab - 1:
        one, other = draw.choice(grown), draw.choice(common if draw.random() < 0.5 else grown)
        if len(one + other) <= 12 and one + other not in known:
            known.add(one + other)
            pieces.append(one + other)
            grown.append(one + other)
            merges.append([one, other])
    return byte_level_json(pieces, merges, (vocab - 1, "<|end|>"))


class Constrained:
    """Runs the node's steps over requests that answer with SCHEMA."""

    def __init__(self, steps: DecodeSteps, compiler: GrammarCompiler, forced: bool) -> None:
        self._steps = steps
        self._compiler = compiler
        self._forced = forced
        self._grammar: str = LLMatcher.grammar_from_json_schema(
            json.dumps(SCHEMA), overrides={"whitespace_flexible": False}
        )

    def start(self, requests: Sequence[DecodeRequest]) -> None:
        for request in requests:
            request.sampling = replace(request.sampling, grammar=self._grammar)
            request.matcher = self._compiler.matcher(self._grammar)
            request.masked = True

    def run(self, requests: Sequence[DecodeRequest], count: int) -> Times:
        times = Times()
        begin = time.perf_counter()
        for index in range(WARM_UP + count):
            width = self._width(requests)
            plan = step_plan(requests, self._steps.rules, index, forced_width=width)
            times.follow.append(time.perf_counter() - begin)
            launched = self._steps.of(plan).launch(plan)
            assert isinstance(launched, MaskedStep)
            waiting = time.perf_counter()
            masks = step_masks(index, requests, launched.trees(), self._compiler.vocab_size)
            times.masks.append(time.perf_counter() - waiting)
            launched.draw(masks)
            launched.completion.wait()
            ended = time.perf_counter()
            drawn = self._follow(plan, requests, launched)
            times.tokens += drawn * (index >= WARM_UP)
            times.steps.append(ended - begin)
            begin = ended
        return times

    def _width(self, requests: Sequence[DecodeRequest]) -> int:
        rules = self._steps.rules
        most = rules.most_forced(len(requests)) if self._forced else 0
        for request in requests:
            assert request.matcher is not None
            request.forced = tuple(request.matcher.forced(most))
        return rules.forced_width([request.forced_row for request in requests])

    def _follow(self, plan: StepPlan, requests: Sequence[DecodeRequest], launched: Launched) -> int:
        total, emissions = 0, list[Emission]()
        for request, row in zip(requests, launched.read().rows, strict=True):
            forced = min(len(request.forced), plan.width)
            emissions.append(Emission(request, row.tokens, forced=forced))
            known = [token.id for token in row.tokens if token is not None]
            assert len(known) == len(row.tokens), "logits that are not finite"
            for token in known:
                assert request.append(token) is None
            assert request.failure is None, request.failure
            total += len(known)
        self._steps.rules.observe(plan, emissions, 0.0)
        return total


def free_run(steps: DecodeSteps, requests: Sequence[DecodeRequest], count: int) -> Times:
    """Run steps with one in flight, as a node does without constrained requests."""
    times, unread = Times(), list[Launched]()
    begin = time.perf_counter()
    for index in range(WARM_UP + count):
        plan = step_plan(requests, steps.rules, index)
        unread.append(steps.of(plan).launch(plan))
        drawn = 0
        if len(unread) > 1:
            launched = unread.pop(0)
            launched.completion.wait()
            drawn = sum(len(row.tokens) for row in launched.read().rows)
        ended = time.perf_counter()
        times.steps.append(ended - begin)
        times.tokens += drawn * (index >= WARM_UP)
        begin = ended
    unread[0].completion.wait()
    return times


class Bench:
    """Measures the steps of an engine."""

    def __init__(self, engine: Engine, steps: DecodeSteps, compiler: GrammarCompiler, length: int) -> None:
        self._engine = engine
        self._steps = steps
        self._compiler = compiler
        self._length = length

    def _run(self, batch: int, count: int, drafting: bool, forced: bool | None) -> Times:
        """Run `count` steps of fresh requests, free ones if `forced` is None."""
        most = (WARM_UP + count + 1) * self._steps.rules.most_tokens + 1
        prompts = random_prompts(self._engine.pair, batch, self._length, seed=batch)
        requests = self._engine.start(prompts, most, drafting)
        if forced is None:
            times = free_run(self._steps, requests, count)
        else:
            bench = Constrained(self._steps, self._compiler, forced)
            bench.start(requests)
            times = bench.run(requests, count)
        self._engine.end(requests)
        return times

    def plain(self, batch: int, count: int) -> Row:
        free, masked, forced = (self._run(batch, count, False, forced) for forced in (None, False, True))
        return Row(
            batch=batch,
            free_ms=free.ms(free.steps),
            masked_ms=masked.ms(masked.steps),
            forced_ms=forced.ms(forced.steps),
            masked_follow_ms=masked.ms(masked.follow),
            masked_masks_ms=masked.ms(masked.masks),
            forced_follow_ms=forced.ms(forced.follow),
            forced_masks_ms=forced.ms(forced.masks),
            tokens_per_step=forced.tokens / count / batch,
            free_tokens_per_s=free.tokens_per_s,
            masked_tokens_per_s=masked.tokens_per_s,
            forced_tokens_per_s=forced.tokens_per_s,
        )

    def drafted(self, batch: int, count: int) -> DraftedRow:
        free, forced = (self._run(batch, count, True, forced) for forced in (None, True))
        return DraftedRow(
            batch=batch,
            free_ms=free.ms(free.steps),
            json_ms=forced.ms(forced.steps),
            json_follow_ms=forced.ms(forced.follow),
            json_masks_ms=forced.ms(forced.masks),
            free_tokens_per_step=free.tokens / count / batch,
            json_tokens_per_step=forced.tokens / count / batch,
            free_tokens_per_s=free.tokens_per_s,
            json_tokens_per_s=forced.tokens_per_s,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--model", type=Path, help="directory of a target to load instead of a constructed one"
    )
    parser.add_argument("--draft", type=Path, help="directory of an EAGLE-3 head for it")
    parser.add_argument("--drafter", choices=("none", EAGLE3), default="none")
    parser.add_argument("--drafts", type=int, default=3, help="drafts per round of a drafter")
    parser.add_argument(
        "--small", action="store_true", help="construct a small target of 128k tokens, for CPUs"
    )
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 16, 32, 64])
    parser.add_argument("--length", type=int, default=1024, help="prompt tokens")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device = torch.device(options.device)
    plain = options.drafter == "none"
    # The widest step for forced tokens needs the room; without a drafter it is the only one with drafts.
    widest = PLAIN_WIDTHS[0] if plain else max(options.drafts, DRAFTED_WIDTHS[0])
    drafts = widest if plain else options.drafts
    models: Pair
    if options.model is None:
        raw = SMALL.config() if options.small else config_of(LLAMA)
        models = pair(raw, EAGLE3, Drafting(0.5), drafts, 0, device)
        tokenizer = constructed_tokenizer(models.model.config.vocab_size)
        ends = [models.model.config.vocab_size - 1]
    else:
        models = loaded(options.model, options.draft, drafts, device)
        tokenizer = (options.model / "tokenizer.json").read_text()
        ends = list(models.model.config.eos_token_ids)
    began = time.perf_counter()
    compiler = GrammarCompiler(tokenizer, models.model.config.vocab_size, ends)
    print(f"tokenizer of {compiler.vocab_size} tokens read in {time.perf_counter() - began:.1f} s")
    most = options.length + (WARM_UP + options.steps + 2) * (widest + 1) + 1
    engine = Engine(models, max(options.batch), most, drafts, slots=widest + 1)
    steps = engine.step(options.drafter, constrains=True)
    bench = Bench(engine, steps, compiler, options.length)
    rows: list[Row | DraftedRow] = []
    for batch in options.batch:
        rows.append((bench.plain if plain else bench.drafted)(batch, options.steps))
        print(json.dumps({key: round(value, 3) for key, value in asdict(rows[-1]).items()}))
    for phase in steps.graphs:
        runner = phase.forward.graphs
        shown = {"tokens_per_request": runner.spec.tokens_per_request, **to_builtins(runner.totals())}
        print(json.dumps({"graph": shown}))
    if options.json is not None:
        environment = describe()
        options.json.write_text(
            json.dumps({"environment": environment, "rows": [asdict(row) for row in rows]}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
