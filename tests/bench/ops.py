"""Each op at the 8B shape in bf16 against its floor on the same GPU in the same run.

    python -m tests.bench.ops [--json FILE] [--only NAME ...]

`--only tune` tries other tile shapes of extend attention. Those of decode attention and of products of few rows are in
layer_attention.py and layer_products.py.

The floor is the larger of bytes over the copy bandwidth and operations over the matrix rate, both measured first.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from common.engine.attention.whole_prompt import attend_whole_prompt
from common.engine.ops.decode_attention import decode_triton
from common.engine.ops.extend_attention import extend_triton
from common.engine.ops.linear import gated_linear, linear
from common.engine.ops.output_norm import add_normed_rms_norm
from common.engine.ops.rms_norm import add_rms_norm, rms_norm
from common.engine.ops.rotary import rotary_angles
from common.engine.ops.rotary_kv_write import rotary_kv_write
from common.engine.ops.sample_tokens import sample_tokens
from common.engine.ops.sigmoid_gate import sigmoid_gate
from common.engine.ops.silu_mul import gelu_mul, silu_mul
from common.engine.ops.token_norm import token_norm
from common.engine.ops.top_tokens import top_tokens, top_tokens_reference
from common.engine.ops.verify_attention import verify_triton
from common.engine.sampling.logit_adjustments import AdjustmentRows, Adjustments
from common.engine.sampling.sampler import SamplingBatch, sample
from common.engine.sampling.sampling_plan import AdjustmentFacts
from tests.bench.environment import describe
from tests.bench.timing import copy_bandwidth, graph_us, matmul_rate, sets_for

HIDDEN, HEADS, KV_HEADS, DIM, INTER, VOCAB, PAGE = 4096, 32, 8, 128, 14336, 128256, 16
SCALE = DIM**-0.5
TOKENS = (1, 16, 128, 512, 2048, 8192)


@dataclass(frozen=True, slots=True)
class Result:
    op: str
    shape: str
    us: float
    gbytes: float  # minimum traffic
    gflop: float  # matrix operations
    floor_us: float = 0.0


def bf16(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda").to(torch.bfloat16)


def measure(op: str, shape: str, calls: list[Callable[[], object]], nbytes: float, flop: float = 0) -> Result:
    return Result(op, shape, graph_us(calls), nbytes / 1e9, flop / 1e9)


def of_other_families() -> Iterator[Result]:
    """Measure what Gemma, OLMo2 and gated attention run in place of the operations of Llama."""
    gain = 1 + bf16(HIDDEN).float()
    for tokens in TOKENS:
        size = tokens * HIDDEN * 2
        sets = [(bf16(tokens, HIDDEN), bf16(tokens, HIDDEN)) for _ in range(sets_for(4 * size))]
        calls: list[Callable[[], object]] = [
            partial(add_normed_rms_norm, x, y, gain, gain, 1e-5) for x, y in sets
        ]
        yield measure("add_normed_rms_norm", f"{tokens}", calls, 4 * size)
        calls = [partial(sigmoid_gate, x, y) for x, y in sets]
        yield measure("sigmoid_gate", f"{tokens}", calls, 3 * size)
        merged = [bf16(tokens, 3 * HIDDEN) for _ in range(sets_for(4 * size))]
        calls = [partial(token_norm, x, gain, gain, 1e-5) for x in merged]
        yield measure("token_norm", f"{tokens}", calls, 4 * size)
        wide = [bf16(tokens, 2 * INTER) for _ in range(sets_for(6 * tokens * INTER))]
        yield measure("gelu_mul", f"{tokens}", [partial(gelu_mul, x) for x in wide], 6 * tokens * INTER)


def elementwise() -> Iterator[Result]:
    weight = bf16(HIDDEN)
    inv_freq = 500000.0 ** (-torch.arange(0, DIM, 2, device="cuda") / DIM)
    for tokens in TOKENS:
        size = tokens * HIDDEN * 2
        sets = [(bf16(tokens, HIDDEN), bf16(tokens, HIDDEN)) for _ in range(sets_for(4 * size))]
        calls: list[Callable[[], object]] = [partial(rms_norm, x, weight, 1e-5) for x, _ in sets]
        yield measure("rms_norm", f"{tokens}", calls, 2 * size)
        calls = [partial(add_rms_norm, x, y, weight, 1e-5) for x, y in sets]
        yield measure("add_rms_norm", f"{tokens}", calls, 4 * size)
        wide = [bf16(tokens, 2 * INTER) for _ in range(sets_for(6 * tokens * INTER))]
        yield measure("silu_mul", f"{tokens}", [partial(silu_mul, x) for x in wide], 6 * tokens * INTER)
        positions = torch.arange(tokens, device="cuda")
        angles = partial(rotary_angles, positions, inv_freq, 1.0, torch.bfloat16)
        yield measure("rotary_angles", f"{tokens}", [angles], 4 * tokens * DIM)
        cos, sin = angles()
        planes = torch.zeros(2, tokens // PAGE + 2, PAGE, KV_HEADS, DIM, device="cuda", dtype=torch.bfloat16)
        slots = torch.randperm(tokens, device="cuda") + PAGE
        moved = tokens * DIM * 2 * (2 * (HEADS + KV_HEADS) + KV_HEADS + 2 * KV_HEADS)
        merged = [bf16(tokens, HEADS + 2 * KV_HEADS, DIM) for _ in range(sets_for(moved))]
        for name, norms in (("", (None, None)), (" + norm", (bf16(DIM), bf16(DIM)))):
            query_norm, key_norm = norms
            calls = [
                partial(rotary_kv_write, x, cos, sin, query_norm, key_norm, 1e-6, planes[0], planes[1], slots)
                for x in merged
            ]
            yield measure(f"rotary_kv_write{name}", f"{tokens}", calls, moved)


class Pages:
    """B requests of `length` tokens over shuffled pages, with enough copies of the planes to defeat the L2 cache."""

    def __init__(self, batch: int, length: int, most: int = 8) -> None:
        per_request = -(-length // PAGE)
        count = batch * per_request + 1
        self.nbytes = 2 * batch * length * KV_HEADS * DIM * 2
        self.planes = [bf16(2, count, PAGE, KV_HEADS, DIM) for _ in range(sets_for(self.nbytes, most))]
        order = torch.randperm(count - 1, device="cuda") + 1
        self.table = order.view(batch, per_request).to(torch.int32)
        self.lengths = torch.full((batch,), length, dtype=torch.int32, device="cuda")


def decode_calls(batch: int, length: int) -> tuple[list[Callable[[], object]], Pages]:
    pages, query = Pages(batch, length), bf16(batch, HEADS, DIM)
    tail = pages.table, pages.lengths, 8192, None, SCALE
    return [partial(decode_triton, query, key, value, *tail) for key, value in pages.planes], pages


def decode() -> Iterator[Result]:
    for batch, length in itertools.product((1, 4, 16, 32, 64, 128), (1152,)):
        calls, pages = decode_calls(batch, length)
        yield measure("decode_attention", f"{batch} x {length}", calls, pages.nbytes)
    for batch, length in ((1, 8192), (8, 8192), (32, 100)):
        calls, pages = decode_calls(batch, length)
        yield measure("decode_attention", f"{batch} x {length}", calls, pages.nbytes)


def verify_calls(batch: int, length: int, new: int) -> tuple[list[Callable[[], object]], Pages]:
    """Return calls that verify a chain of `new` tokens at the end of each request."""
    pages, query = Pages(batch, length), bf16(batch * new, HEADS, DIM)
    mask = torch.ones(new, new, dtype=torch.bool, device="cuda").tril().expand(batch, -1, -1)
    tail = pages.table, pages.lengths, mask, 8192, None, SCALE
    return [partial(verify_triton, query, key, value, *tail) for key, value in pages.planes], pages


def verify() -> Iterator[Result]:
    for batch, length, new in (
        *((batch, 1152, 4) for batch in (1, 4, 16, 32, 64, 128)),
        (16, 1152, 8),
        (1, 8192, 4),
        (8, 8192, 4),
        (16, 1152, 24),
    ):
        calls, pages = verify_calls(batch, length, new)
        yield measure("verify_attention", f"{batch} x {new} at {length}", calls, pages.nbytes)


MATRICES = {
    "qkv": ((HEADS + 2 * KV_HEADS) * DIM, HIDDEN),
    "o": (HIDDEN, HIDDEN),
    "gate_up": (2 * INTER, HIDDEN),
    "down": (HIDDEN, INTER),
    "draft qkv": ((HEADS + 2 * KV_HEADS) * DIM, 2 * HIDDEN),
    "draft head": (32000, HIDDEN),
    "head": (VOCAB, HIDDEN),
}


def product_calls(
    size: int, depth: int, rows: int, run: Callable[..., object]
) -> tuple[list[Callable[[], object]], float]:
    nbytes = 2 * size * depth
    weights = [bf16(size, depth) / 64 for _ in range(sets_for(nbytes))]
    x = bf16(rows, depth)
    return [partial(run, x, weight, None) for weight in weights], nbytes


def skinny() -> Iterator[Result]:
    """Measure products of few rows, by cuBLAS and by our kernel."""
    for name, (size, depth) in MATRICES.items():
        for rows in (1, 4, 16):
            for by, run in (("cuBLAS", torch.nn.functional.linear), ("served", linear)):
                calls, nbytes = product_calls(size, depth, rows, run)
                yield measure(f"product {name}, {by}", f"{rows} x {size} x {depth}", calls, nbytes)
    size, depth = MATRICES["gate_up"]
    for rows in (1, 4, 16):
        for by, run in (("cuBLAS", two_kernels), ("served", gated_linear)):
            calls, nbytes = product_calls(size, depth, rows, run)
            yield measure(f"gate_up and silu, {by}", f"{rows} x {size} x {depth}", calls, nbytes)


def two_kernels(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return silu_mul(torch.nn.functional.linear(x, weight, bias))


def draft_top() -> Iterator[Result]:
    for rows, count in itertools.product((1, 16, 64), (1, 8)):
        logits = [torch.randn(rows, 32000, device="cuda") for _ in range(sets_for(rows * 128000))]
        for name, run in (("torch", top_tokens_reference), ("ours", top_tokens)):
            calls: list[Callable[[], object]] = [partial(run, x, count) for x in logits]
            yield measure(f"top_tokens, {name}", f"{rows} of 32000, {count}", calls, logits[0].nbytes)


def extend_args(new: int, cached: int, batch: int = 1) -> tuple[Pages, Tensor, Tensor, float, float]:
    """Return (pages, starts, queries, bytes, matrix operations)."""
    pages = Pages(batch, new + cached)
    starts = torch.arange(batch + 1, device="cuda", dtype=torch.int32) * new
    flop = 4 * HEADS * DIM * batch * (new * cached + new * (new + 1) / 2)
    return pages, starts, bf16(batch * new, HEADS, DIM), pages.nbytes + 4 * batch * new * HEADS * DIM, flop


def extend() -> Iterator[Result]:
    for new, cached, batch in (
        *((n, 0, 1) for n in (64, 128, 256, 512, 1024, 2048, 4096, 8192)),
        (512, 512, 1),
        (512, 4096, 1),
        (2048, 6144, 1),
        (512, 0, 8),
    ):
        pages, starts, query, nbytes, flop = extend_args(new, cached, batch)
        tail = pages.table, starts, pages.lengths, None, SCALE
        calls: list[Callable[[], object]] = [
            partial(extend_triton, query, key, value, *tail) for key, value in pages.planes
        ]
        yield measure("extend_attention", f"{batch} x {new} after {cached}", calls, nbytes, flop)


def whole_prompt() -> Iterator[Result]:
    for new in (64, 128, 256, 512, 1024, 2048, 4096, 8192):
        sets = [bf16(new, HEADS + 2 * KV_HEADS, DIM) for _ in range(4)]
        calls: list[Callable[[], object]] = [
            partial(
                attend_whole_prompt, x[:, :HEADS], x[:, HEADS : HEADS + KV_HEADS], x[:, -KV_HEADS:], SCALE
            )
            for x in sets
        ]
        flop = 2 * HEADS * DIM * new * (new + 1)
        yield measure("whole_prompt (cuDNN)", f"{new}", calls, sets[0].nbytes, flop)


def first_calls() -> Iterator[Result]:
    """Measure what a length costs that cuDNN has not seen: host time of its first call, in us."""
    for new in (777, 1333, 3001, 5003):
        x = bf16(new, HEADS + 2 * KV_HEADS, DIM)
        run = partial(
            attend_whole_prompt, x[:, :HEADS], x[:, HEADS : HEADS + KV_HEADS], x[:, -KV_HEADS:], SCALE
        )
        for name in ("first", "second"):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            run()
            torch.cuda.synchronize()
            yield Result(f"cuDNN {name} call, host", f"{new}", 1e6 * (time.perf_counter() - begin), 0.0, 0.0)


def sampling() -> Iterator[Result]:
    for rows in (1, 16, 128):
        logits = [torch.randn(rows, VOCAB, device="cuda") for _ in range(sets_for(rows * VOCAB * 4))]
        ones = torch.ones(rows, device="cuda")
        seed = torch.arange(rows, device="cuda")
        for name, greedy in (("greedy", True), ("random", False)):
            calls: list[Callable[[], object]] = [
                partial(sample_tokens, x, ones * (not greedy), seed, seed, None, greedy) for x in logits
            ]
            yield measure(f"sample_tokens {name}", f"{rows}", calls, logits[0].nbytes)
        batch = SamplingBatch(ones, 0.9 * ones, (50 * ones).int(), 0 * ones, seed, seed, False, True, None)
        calls = [partial(sample, x, batch) for x in logits]
        yield measure("sample top-k top-p", f"{rows}", calls, logits[0].nbytes)
        state, owners = AdjustmentRows.allocate(rows, VOCAB, ones.device), seed + 1
        facts = AdjustmentFacts(penalties=True, biases=16, withheld=2)
        adjust = Adjustments(state, owners, facts, owners.new_empty(rows, 0))
        calls = [partial(adjust.apply, x, seed) for x in logits]
        yield measure("penalties and biases", f"{rows}", calls, 3 * logits[0].nbytes)


def host() -> Iterator[Result]:
    """Measure CPU microseconds per eager call, which a break in a prefill graph costs per layer."""
    pages, starts, query, _, _ = extend_args(128, 0)
    planes = pages.planes[0]
    op = torch.ops.tandem.extend_attention.default
    x, weight = bf16(128, HIDDEN), bf16(HIDDEN)
    for name, call in (
        ("extend_attention", lambda: op(query, *planes, pages.table, starts, pages.lengths, None, SCALE)),
        ("rms_norm", lambda: rms_norm(x, weight, 1e-5)),
    ):
        call()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(200):
            call()
        spent = time.perf_counter() - begin
        torch.cuda.synchronize()
        yield Result(f"host: {name}", "128", 1e6 * spent / 200, 0.0, 0.0)


def tune() -> Iterator[Result]:
    """Measure other tile shapes of extend attention."""
    work = {new: extend_args(new, 0) for new in (256, 512, 1024, 2048, 8192)}
    for rows, keys, warps, stages in (
        (64, 64, 4, 2),
        (64, 64, 4, 3),
        (128, 64, 4, 3),
        (128, 64, 4, 2),
        (128, 128, 8, 2),
        (256, 64, 8, 2),
    ):
        for new, (pages, starts, query, nbytes, flop) in work.items():
            tail = pages.table, starts, pages.lengths, None, SCALE
            shaped = partial(extend_triton, shape=(rows, keys, warps), num_stages=stages)
            calls: list[Callable[[], object]] = [
                partial(shaped, query, key, value, *tail) for key, value in pages.planes
            ]
            shape = f"{new} rows {rows} keys {keys} warps {warps} stages {stages}"
            yield measure("tune extend", shape, calls, nbytes, flop)


TUNING: dict[str, Callable[[], Iterator[Result]]] = {"tune": tune}
SECTIONS: dict[str, Callable[[], Iterator[Result]]] = {
    section.__name__: section
    for section in (
        elementwise,
        of_other_families,
        decode,
        verify,
        extend,
        whole_prompt,
        first_calls,
        sampling,
        skinny,
        draft_top,
        host,
    )
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", nargs="*", choices=[*SECTIONS, *TUNING], default=list(SECTIONS))
    args = parser.parse_args()
    torch.manual_seed(0)
    bandwidth, rate = copy_bandwidth(), matmul_rate()
    print(f"copy {bandwidth / 1e12:.2f} TB/s, bf16 product {rate / 1e12:.0f} TFLOP/s")
    print(f"{'op':28} {'shape':44} {'us':>9} {'GB/s':>7} {'TFLOP/s':>8} {'floor us':>9} {'x floor':>7}")
    sections = [{**SECTIONS, **TUNING}[name] for name in args.only]
    results = []
    for result in itertools.chain.from_iterable(section() for section in sections):
        floor = max(result.gbytes * 1e15 / bandwidth, result.gflop * 1e15 / rate)
        results.append(replace(result, floor_us=floor))
        print(
            f"{result.op:28} {result.shape:44} {result.us:9.2f} {1e6 * result.gbytes / result.us:7.0f} "
            f"{1e3 * result.gflop / result.us:8.1f} {floor:9.2f} {result.us / floor if floor else 0:7.2f}",
            flush=True,
        )
    if args.json:
        floors = {"copy_bytes_per_s": bandwidth, "bf16_flop_per_s": rate}
        document = {**describe(), **floors, "results": [asdict(result) for result in results]}
        args.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
