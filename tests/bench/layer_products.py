"""The matrix products of a step and the norms that follow them, as launched in a step, with other divisions.

    python -m tests.bench.layer_products [--rows 1 4 16] [--layers 32] [--shape 8b] [--others] [--json FILE]

Every variant uses all layers' weights once, in one graph, so that the same kernels overlap as in a step; attention is
left out. One matrix at a time is varied while the others stay as served; without `--others` only the served variant and
the library are compared. LM heads are measured by themselves. The floor is the bytes of the weights divided by the copy
bandwidth of the same run.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from common.engine.ops.linear import gated_linear, linear, linear_parts, linear_triton
from common.engine.ops.linear_norm import linear_add_rms_norm
from common.engine.ops.rms_norm import add_parts_rms_norm_triton, add_rms_norm_triton
from common.engine.ops.silu_mul import silu_mul_triton
from common.engine.ops.tiles import Tiles
from common.engine.ops.triton_kernel import cdiv, multiprocessors, next_power_of_2
from tests.bench.environment import describe
from tests.bench.timing import copy_bandwidth, graph_us, sets_for, wake

EPS = 1e-5
HEADS = (128256, 32000)  # rows of LM heads: the target's, EAGLE-3's
SHARED = 225 << 10
KINDS = [  # (columns, depth, warps, stages)
    (32, 128, 4, 4),
    (32, 128, 4, 6),
    (64, 128, 4, 2),
    (64, 128, 4, 3),
    (64, 128, 4, 4),
    (64, 128, 4, 6),
    (64, 64, 4, 3),
    (64, 64, 4, 4),
    (64, 64, 4, 6),
    (64, 64, 8, 5),
    (128, 128, 8, 3),
    (128, 64, 8, 4),
    (128, 64, 8, 6),
]
SERVED, LIBRARY = "served", "library"
Way = Tiles | str
Ways = dict[str, Way]


@dataclass(frozen=True)
class Shape:
    hidden: int
    inter: int
    heads: int  # total query width of a token
    qkv: int

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        """Name -> (size, depth), in the order of a layer."""
        return {
            "qkv": (self.qkv, self.hidden),
            "o": (self.hidden, self.heads),
            "gate_up": (2 * self.inter, self.hidden),
            "down": (self.hidden, self.inter),
        }


SHAPES = {
    "8b": Shape(4096, 14336, 4096, 6144),
    "qwen3-0.6b": Shape(1024, 3072, 2048, 4096),
    "qwen3-4b": Shape(2560, 9728, 4096, 6144),
    "qwen2.5-7b": Shape(3584, 18944, 3584, 4608),
    "qwen3-14b": Shape(5120, 17408, 5120, 7168),
    "qwen3-32b": Shape(5120, 25600, 8192, 10240),
    "llama-3.2-3b": Shape(3072, 8192, 3072, 5120),
}


@dataclass(frozen=True)
class Row:
    variant: str
    rows: int
    us: float
    floor_us: float


def made(*shape: int) -> Tensor:
    return (torch.randn(shape, device="cuda") / shape[-1] ** 0.5).to(torch.bfloat16)


def product(x: Tensor, weight: Tensor, way: Way, gated: bool = False) -> Tensor:
    if isinstance(way, Tiles):
        return linear_triton(x, weight, None, way, "silu" if gated else None)
    if way == SERVED:
        return gated_linear(x, weight, None) if gated else linear(x, weight, None)
    return silu_mul_triton(F.linear(x, weight)) if gated else F.linear(x, weight)


def normed(x: Tensor, weight: Tensor, stream: Tensor, gain: Tensor, way: Way) -> tuple[Tensor, Tensor]:
    if way == SERVED:
        return linear_add_rms_norm(x, weight, None, stream, gain, EPS)
    if isinstance(way, Tiles) and way.parts > 1:
        return add_parts_rms_norm_triton(linear_parts(x, weight, None, way), stream, gain, EPS)
    return add_rms_norm_triton(product(x, weight, way), stream, gain, EPS)


class Stack:
    """The weights of all layers."""

    def __init__(self, shape: Shape, layers: int) -> None:
        self.shape = shape
        self.gain = torch.randn(shape.hidden, device="cuda").to(torch.bfloat16)
        self.layers = [[made(*each) for each in shape.matrices.values()] for _ in range(layers)]
        self.nbytes = sum(weight.nbytes for layer in self.layers for weight in layer)

    def run(self, x: Tensor, ways: Ways) -> Tensor:
        stream = after = x
        for qkv, o, gate_up, down in self.layers:
            heads = product(after, qkv, ways["qkv"])[:, : self.shape.heads]
            after, stream = normed(heads.contiguous(), o, stream, self.gain, ways["o"])
            inner = product(after, gate_up, ways["gate_up"], gated=True)
            after, stream = normed(inner, down, stream, self.gain, ways["down"])
        return after


def other_tiles(rows: int, size: int, gated: bool, processors: int, most_parts: int) -> Iterator[Tiles]:
    """Return tiles that fit and whose number is neither too small nor too large."""
    room = max(16, next_power_of_2(rows))
    for columns, depth, warps, stages in KINDS:
        width = columns * (2 if gated else 1)
        fits = 2 * (room + width) * depth * stages <= SHARED and room * width <= 1 << 15
        for parts in (1, 2, 3, 4, 5, 8):
            programs = cdiv(size, width) * parts
            enough = 2 * processors <= 3 * programs and (parts == 1 or programs <= 3 * processors)
            if fits and enough and parts <= most_parts:
                yield Tiles(columns, depth, warps, stages, room, parts)


def variants(shape: Shape, rows: int, others: bool) -> Iterator[tuple[str, Ways]]:
    as_served: Ways = dict.fromkeys(shape.matrices, SERVED)
    yield SERVED, as_served
    yield LIBRARY, dict.fromkeys(shape.matrices, LIBRARY)
    for name, (size, _) in shape.matrices.items() if others else ():
        yield f"{name} by the library", {**as_served, name: LIBRARY}
        most = 8 if name in ("o", "down") else 1
        for tiles in other_tiles(rows, size, name == "gate_up", multiprocessors(torch.device("cuda")), most):
            yield f"{name} {tuple(tiles)}", {**as_served, name: tiles}
    yield "served, once more", as_served


def heads(shape: Shape, rows: int, others: bool, bandwidth: float) -> Iterator[Row]:
    x = made(rows, shape.hidden)
    for size in HEADS:
        weights = [made(size, shape.hidden) for _ in range(sets_for(2 * size * shape.hidden, 4))]
        ways: list[Way] = [SERVED, LIBRARY]
        if others:
            ways += other_tiles(rows, size, False, multiprocessors(x.device), 1)
        for way in ways:
            us = graph_us([partial(product, x, weight, way) for weight in weights])
            yield Row(f"LM head of {size} {way}", rows, us, 1e6 * weights[0].nbytes / bandwidth)


def layers(stack: Stack, rows: int, others: bool, bandwidth: float) -> Iterator[Row]:
    x = made(rows, stack.shape.hidden)
    expected = stack.run(x, dict.fromkeys(stack.shape.matrices, LIBRARY)).float()
    for name, ways in variants(stack.shape, rows, others):
        wrong = (stack.run(x, ways).float() - expected).norm() / expected.norm()
        assert wrong < 0.05, f"{name}: {wrong}"
        us = graph_us([partial(stack.run, x, ways)], 1)
        yield Row(name, rows, us, 1e6 * stack.nbytes / bandwidth)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 32, 64, 128])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--others", action="store_true", help="try other tiles, too")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    stack, bandwidth = Stack(SHAPES[options.shape], options.layers), copy_bandwidth()
    found = []
    for rows in options.rows:
        wake()
        for section in (
            partial(layers, stack),
            partial(heads, stack.shape),
        ):
            for row in section(rows, options.others, bandwidth):
                found.append(row)
                print(
                    f"{rows:4d} {row.us:9.1f} us {row.us / row.floor_us:6.3f} of the floor  {row.variant}",
                    flush=True,
                )
    if options.json:
        report = {"environment": describe(), "options": vars(options), "rows": [asdict(row) for row in found]}
        options.json.write_text(json.dumps(report, indent=2, default=str) + "\n")


if __name__ == "__main__":
    main()
