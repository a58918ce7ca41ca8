"""The matrix products of a decode step and the norms behind them, as launched in a step, in other divisions.

    python -m tests.bench.layer_products [--rows 1 4 16] [--layers 32] [--json FILE]

Every variant runs all layers' weights once, in one graph, so that what overlaps in a step overlaps here; attention is
left out. One matrix after another is varied while the others are as served. The floor: bytes of the weights over the
copy bandwidth of the same run.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from common.engine.ops.linear import Tiles, gated_linear, linear, linear_parts, linear_triton
from common.engine.ops.linear_norm import linear_add_rms_norm
from common.engine.ops.rms_norm import add_parts_rms_norm_triton, add_rms_norm_triton
from tests.bench.environment import describe
from tests.bench.timing import copy_bandwidth, graph_us, wake

HIDDEN, INTER, QKV = 4096, 14336, 6144
EPS = 1e-5
Product = Callable[[Tensor, Tensor], Tensor]
Normed = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Ways:
    """How each product of a layer is made."""

    qkv: Product
    o: Normed
    gate_up: Product
    down: Normed


@dataclass(frozen=True)
class Row:
    variant: str
    rows: int
    us: float
    floor_us: float


class Stack:
    """Weights of all layers, as large as those of the 8B shape."""

    def __init__(self, layers: int) -> None:
        def made(*shape: int) -> Tensor:
            return (torch.randn(shape, device="cuda") / shape[-1] ** 0.5).to(torch.bfloat16)

        self.gain = torch.randn(HIDDEN, device="cuda").to(torch.bfloat16)
        self.layers = [
            (made(QKV, HIDDEN), made(HIDDEN, HIDDEN), made(2 * INTER, HIDDEN), made(HIDDEN, INTER))
            for _ in range(layers)
        ]
        self.nbytes = sum(weight.nbytes for layer in self.layers for weight in layer)

    def run(self, x: Tensor, ways: Ways) -> Tensor:
        stream = normed = x
        for qkv, o, gate_up, down in self.layers:
            heads = ways.qkv(normed, qkv)[:, :HIDDEN]
            normed, stream = ways.o(heads, o, stream, self.gain)
            normed, stream = ways.down(ways.gate_up(normed, gate_up), down, stream, self.gain)
        return normed


def served(x: Tensor, weight: Tensor, stream: Tensor, gain: Tensor) -> tuple[Tensor, Tensor]:
    return linear_add_rms_norm(x, weight, None, stream, gain, EPS)


def library(x: Tensor, weight: Tensor, stream: Tensor, gain: Tensor) -> tuple[Tensor, Tensor]:
    return add_rms_norm_triton(F.linear(x, weight), stream, gain, EPS)


def divided(x: Tensor, weight: Tensor, stream: Tensor, gain: Tensor, tiles: Tiles) -> tuple[Tensor, Tensor]:
    return add_parts_rms_norm_triton(linear_parts(x, weight, tiles), stream, gain, EPS)


def product(x: Tensor, weight: Tensor, tiles: Tiles | None = None, gated: bool = False) -> Tensor:
    if tiles is not None:
        return linear_triton(x, weight, None, tiles, gated=gated)
    return gated_linear(x, weight, None) if gated else linear(x, weight, None)


SERVED = Ways(product, served, partial(product, gated=True), served)
BASE = Tiles(32, 256, 4, 3)
DOWN = [
    *(BASE._replace(parts=parts) for parts in (2, 4, 7, 8)),
    *(BASE._replace(stages=stages, parts=4) for stages in (2, 4)),
    *(Tiles(64, 256, warps, 3, parts=parts) for warps in (4, 8) for parts in (2, 4)),
    Tiles(32, 512, 4, 2, parts=4),
    Tiles(32, 256, 8, 3, parts=4),
    Tiles(64, 512, 8, 2, parts=4),
    Tiles(16, 512, 4, 3, parts=2),
]
OUT = [
    *(BASE._replace(stages=stages, parts=parts) for stages in (2, 3, 4) for parts in (2, 4)),
    Tiles(16, 256, 4, 4),
    Tiles(16, 512, 4, 3),
    Tiles(16, 512, 4, 3, parts=2),
    Tiles(32, 512, 4, 2, parts=2),
    Tiles(64, 256, 8, 3, parts=4),
    Tiles(32, 256, 8, 3, parts=2),
]
QKV_TILES = [Tiles(16, 256, 4, 4), BASE, Tiles(32, 128, 4, 4), Tiles(64, 128, 4, 4)]
GATES = [
    Tiles(32, 256, 4, 2),
    Tiles(16, 256, 4, 4),
    Tiles(16, 256, 4, 3),
    Tiles(16, 512, 4, 2),
    Tiles(16, 512, 4, 3),
    Tiles(64, 128, 8, 3),
    Tiles(32, 128, 4, 5),
    Tiles(64, 256, 8, 2),
]


def variants(rows: int) -> Iterator[tuple[str, Ways]]:
    room = max(rows, 16)

    def sized(way: Callable[..., Any], tiles: Tiles, **more: bool) -> Callable[..., Any]:
        return partial(way, tiles=tiles._replace(rows=room), **more)

    yield "served", SERVED
    yield "o and down by cuBLAS", replace(SERVED, o=library, down=library)
    for tiles in OUT:
        yield f"o {tuple(tiles)}", replace(SERVED, o=sized(divided, tiles))
    for tiles in DOWN:
        yield f"down {tuple(tiles)}", replace(SERVED, down=sized(divided, tiles))
    for tiles in QKV_TILES:
        yield f"qkv {tuple(tiles)}", replace(SERVED, qkv=sized(product, tiles))
    for tiles in GATES:
        yield f"gate_up {tuple(tiles)}", replace(SERVED, gate_up=sized(product, tiles, gated=True))
    yield "served, once more", SERVED


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    stack = Stack(options.layers)
    floor = 1e6 * stack.nbytes / copy_bandwidth()
    found = []
    for rows in options.rows:
        wake()
        x = torch.randn(rows, HIDDEN, device="cuda").to(torch.bfloat16)
        expected = stack.run(x, Ways(product, library, SERVED.gate_up, library)).float()
        for name, ways in variants(rows):
            try:
                wrong = (stack.run(x, ways).float() - expected).norm() / expected.norm()
                us = graph_us([partial(stack.run, x, ways)], 1)
            except Exception as error:  # what does not fit the GPU is said and left
                print(f"{rows:4d} {name}: {str(error)[:90]}", flush=True)
                continue
            assert wrong < 0.05, f"{name}: {wrong}"
            found.append(Row(name, rows, us, floor))
            print(f"{rows:4d} {us:9.1f} us {us / floor:6.3f} of the floor  {name}", flush=True)
    if options.json:
        report = {"environment": describe(), "options": vars(options), "rows": [asdict(row) for row in found]}
        options.json.write_text(json.dumps(report, indent=2, default=str) + "\n")


if __name__ == "__main__":
    main()
