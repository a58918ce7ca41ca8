"""Attention of steps and verifications between the products that surround it, with its keys divided in other ways.

    python -m tests.bench.attention_parts [--shape llama-3.1-8b] [--requests 4 16] [--new 4] [--keys 1024 8192]
        [--kv-dtype fp8] [--json FILE]

All layers follow each other in one graph, each with weights and pages of its own, so that the kernels overlap as in a
step. `--new` is the number of tokens per request: 1 for a decode step, more for a verification. Each variant is first
compared with the torch references. "Combined" parts are added up by the last program of a tile, others by a kernel.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from common.engine.ops import key_parts
from common.engine.ops.decode_attention import decode_reference, decode_triton
from common.engine.ops.fp8_codes import FP8
from common.engine.ops.key_parts import Division
from common.engine.ops.rms_norm import add_rms_norm_triton
from common.engine.ops.rotary_kv_write import rotary_kv_write_reference, rotary_kv_write_triton
from common.engine.ops.verify_attention import verify_reference, verify_triton
from tests.bench.decode_layers import BF16, DEVICE, DIM, EPS, PAGE, made
from tests.bench.environment import describe
from tests.bench.timing import copy_bandwidth, graph_us, wake

LONGEST = 8192


class Shape(NamedTuple):
    hidden: int
    heads: int
    kv_heads: int
    normed: bool  # queries and keys


SHAPES = {
    "llama-3.1-8b": Shape(4096, 32, 8, False),
    "qwen3-30b-a3b": Shape(2048, 32, 4, True),
    "llama-3.1-70b, one of two ranks": Shape(8192, 32, 4, False),
}


class Way(NamedTuple):
    """How attention is computed. Without a division it is as served."""

    name: str
    division: Division | None = None
    warps: int = 4
    max_combined: int = key_parts.MAX_COMBINED


@dataclass(frozen=True)
class Row:
    shape: str
    requests: int
    new: int
    keys: int
    way: Way
    us: float  # per layer
    floor_us: float


class Layer:
    """Weights of the products around attention, and the pages of one layer."""

    def __init__(self, shape: Shape, requests: int, new: int, keys: int, kv_dtype: torch.dtype) -> None:
        self.shape, self.new, rows = shape, new, requests * new
        self.into = made((shape.heads + 2 * shape.kv_heads) * DIM, shape.hidden)
        self.out = made(shape.hidden, shape.heads * DIM)
        self.gain = torch.ones(shape.hidden, dtype=BF16, device=DEVICE)
        pages = requests * keys // PAGE
        plane = pages + 1, PAGE, shape.kv_heads, DIM
        self.planes = (8 * made(*plane)).to(kv_dtype), (8 * made(*plane)).to(kv_dtype)
        self.table = (torch.randperm(pages, device=DEVICE) + 1).int().view(requests, -1)
        self.lengths = torch.full((requests,), keys, device=DEVICE, dtype=torch.int32)
        position = torch.arange(keys - new, keys, device=DEVICE)
        self.slots = (self.table[:, position // PAGE].long() * PAGE + position % PAGE).flatten()
        self.angles = made(rows, 1, DIM), made(rows, 1, DIM)
        self.norm = made(DIM) if shape.normed else None
        chain = torch.ones(new, new, dtype=torch.bool, device=DEVICE).tril()
        self.chain = chain.expand(requests, new, new).contiguous()

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in (self.into, self.out, *self.planes))

    def attend(self, qkv: Tensor, way: Way) -> Tensor:
        query = qkv[:, : self.shape.heads]
        if way.name == "without attention":
            return query.flatten(1).contiguous()
        rotary_kv_write_triton(qkv, *self.angles, self.norm, self.norm, EPS, *self.planes, self.slots)
        given, rest = (query, *self.planes, self.table, self.lengths), (LONGEST, None, DIM**-0.5)
        key_parts.MAX_COMBINED = way.max_combined
        if self.new == 1:
            out = decode_triton(*given, *rest, division=way.division, num_warps=way.warps)
        else:
            out = verify_triton(*given, self.chain, *rest, division=way.division, num_warps=way.warps)
        return out.flatten(1)

    def expected(self, qkv: Tensor) -> Tensor:
        rotary_kv_write_reference(qkv, *self.angles, self.norm, self.norm, EPS, *self.planes, self.slots)
        given = qkv[:, : self.shape.heads], *self.planes, self.table, self.lengths
        rest = int(self.lengths[0]), None, DIM**-0.5
        if self.new == 1:
            return decode_reference(*given, *rest).flatten(1)
        return verify_reference(*given, self.chain, *rest).flatten(1)

    def run(self, x: Tensor, stream: Tensor, way: Way) -> tuple[Tensor, Tensor]:
        mixed = self.attend(F.linear(x, self.into).view(len(x), -1, DIM), way)
        return add_rms_norm_triton(F.linear(mixed, self.out), stream, self.gain, EPS)


def ways(shape: Shape, requests: int, new: int, kv_dtype: torch.dtype) -> Iterator[Way]:
    programs, rows = requests * shape.kv_heads, new * shape.heads // shape.kv_heads
    eight_bits = kv_dtype is FP8 and new > 1
    choose = key_parts.choose_eight_bits_division if eight_bits else key_parts.choose_division
    served = choose(programs, rows, LONGEST, 2 * DIM, 132)
    yield Way("served")
    yield Way("without attention")
    for splits in dict.fromkeys((served.splits, max(1, served.splits // 2), min(32, 2 * served.splits))):
        for keys, stages, warps in ((64, 2, 4), (64, 3, 4), (128, 2, 4), (128, 2, 8)):
            for name, most in (("combined", 1 << 20), ("separate", 0)):
                if splits > 1 or name == "separate":
                    yield Way(name, Division(splits, keys, stages), warps, most)
    yield Way("served")


def run(layers: list[Layer], x: Tensor, way: Way) -> Tensor:
    stream = x
    for layer in layers:
        x, stream = layer.run(x, stream, way)
    return x


def check(layer: Layer, x: Tensor, way: Way) -> None:
    qkv = F.linear(x, layer.into).view(len(x), -1, DIM)
    if way.name != "without attention":
        found, expected = layer.attend(qkv.clone(), way).float(), layer.expected(qkv.clone()).float()
        wrong = float((found - expected).norm() / expected.norm())
        assert wrong < 0.01, f"{way} is wrong by {wrong}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b")
    parser.add_argument("--requests", type=int, nargs="+", default=[4, 16])
    parser.add_argument("--new", type=int, default=1, help="tokens per request")
    parser.add_argument("--keys", type=int, nargs="+", default=[1024])
    parser.add_argument("--kv-dtype", choices=("auto", "fp8"), default="auto")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    shape, kv_dtype = SHAPES[options.shape], FP8 if options.kv_dtype == "fp8" else BF16
    bandwidth = copy_bandwidth()
    found: list[Row] = []
    wake()
    for requests in options.requests:
        for keys in options.keys:
            given = requests, options.new, keys
            layers = [Layer(shape, *given, kv_dtype) for _ in range(options.layers)]
            x = made(requests * options.new, shape.hidden) * shape.hidden**0.5
            floor = 1e6 * layers[0].nbytes / bandwidth
            print(f"{requests} requests x {options.new} tokens, {keys} keys: floor {floor:.1f} us per layer")
            for way in ways(shape, requests, options.new, kv_dtype):
                check(layers[0], x, way)
                us = graph_us([partial(run, layers, x, way)], 1) / len(layers)
                print(f"{us:8.2f} us  {way.name} {tuple(way.division or ())} {way.warps} warps", flush=True)
                found.append(Row(options.shape, *given, way, us, floor))
    if options.json:
        rows = [asdict(each) for each in found]
        report = {"environment": describe(), "options": vars(options), "rows": rows}
        options.json.write_text(json.dumps(report, indent=2, default=str) + "\n")


if __name__ == "__main__":
    main()
