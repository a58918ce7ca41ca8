"""Router and experts of the layers of a mixture of experts, as launched in a step, against their floor.

    python -m tests.bench.experts [--rows 1 4 16 64] [--layers 8] [--shape qwen3-30b-a3b] [--json FILE]

The layers follow each other in one graph with weights of their own. Tokens are random, so that they choose experts
independently of each other, which uses more experts than text does. The floor of a layer is the bytes of its router and
of the experts that these tokens use, divided by the copy bandwidth of the same run, or for many rows the operations
divided by the rate of large products, whichever is longer.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from common.engine.ops.expert_products import expert_parts
from common.engine.ops.route import route
from common.engine.ops.sum_parts import sum_parts_rms_norm
from tests.bench.environment import describe
from tests.bench.timing import copy_bandwidth, graph_us, matmul_rate, wake


@dataclass(frozen=True)
class Shape:
    hidden: int
    experts: int
    chosen: int
    inner: int
    shared: int = 0
    sigmoid: bool = False


SHAPES = {
    "qwen3-30b-a3b": Shape(2048, 128, 8, 768),
    "qwen3.5-35b-a3b": Shape(2048, 256, 8, 512, shared=1),
    "glm-4.5-air": Shape(4096, 128, 8, 1408, shared=1, sigmoid=True),
    "mixtral-8x7b": Shape(4096, 8, 2, 14336),
}


class Layer(NamedTuple):
    rows: Tensor  # [E, H] of the router
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True)
class Row:
    rows: int
    used: float  # experts per layer
    us: float  # per layer
    products_us: float  # the products' part of it
    floor_us: float


def made(*shape: int) -> Tensor:
    out = torch.empty(shape, dtype=torch.bfloat16, device="cuda")
    return out.normal_(std=shape[-1] ** -0.5)


def layers_of(shape: Shape, count: int) -> list[Layer]:
    total = shape.experts + shape.shared
    return [
        Layer(
            made(shape.experts, shape.hidden),
            made(total, 2 * shape.inner, shape.hidden),
            made(total, shape.hidden, shape.inner),
        )
        for _ in range(count)
    ]


def routed(shape: Shape, layer: Layer, x: Tensor) -> tuple[Tensor, Tensor]:
    rule = (None, 0, shape.chosen, shape.shared, False, shape.sigmoid, 1, 1, True, 0.0, 1.0)
    return route(x, layer.rows, None, *rule)


def step(shape: Shape, layers: list[Layer], x: Tensor) -> Tensor:
    """Run the layers, each with the norm of its sum, one after another."""
    stream, weight = x, x[0]
    for layer in layers:
        experts, shares = routed(shape, layer, x)
        parts = expert_parts(x, layer.gate_up, layer.down, experts, shares)
        x, stream = sum_parts_rms_norm(parts, experts, stream, weight, 1e-6)
    return x


def products(layers: list[Layer], x: Tensor, choices: list[tuple[Tensor, Tensor]]) -> None:
    for layer, choice in zip(layers, choices, strict=True):
        expert_parts(x, layer.gate_up, layer.down, *choice)


def measured(shape: Shape, layers: list[Layer], rows: int, bandwidth: float, rate: float) -> Row:
    x = made(rows, shape.hidden) * shape.hidden**0.5
    choices = [routed(shape, layer, x) for layer in layers]
    used = sum(len(experts.unique()) for experts, _ in choices) / len(layers)
    expert_bytes = 2 * 3 * shape.inner * shape.hidden
    read = used * expert_bytes + layers[0].rows.nbytes
    operations = rows * (shape.chosen + shape.shared) * expert_bytes
    us = graph_us([partial(step, shape, layers, x)], 1) / len(layers)
    products_us = graph_us([partial(products, layers, x, choices)], 1) / len(layers)
    return Row(rows, used, us, products_us, 1e6 * max(read / bandwidth, operations / rate))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 64, 256, 1024, 8192])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-30b-a3b")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    shape = SHAPES[options.shape]
    layers, bandwidth, rate = layers_of(shape, options.layers), copy_bandwidth(), matmul_rate()
    found = []
    for rows in options.rows:
        wake()
        row = measured(shape, layers, rows, bandwidth, rate)
        found.append(row)
        print(
            f"{rows:5d} rows {row.used:6.1f} experts {row.us:9.1f} us (products {row.products_us:9.1f}) "
            f"{row.us / row.floor_us:6.3f} of the floor of {row.floor_us:.1f} us",
            flush=True,
        )
    if options.json:
        report = {"environment": describe(), "options": vars(options), "rows": [asdict(row) for row in found]}
        options.json.write_text(json.dumps(report, indent=2, default=str) + "\n")


if __name__ == "__main__":
    main()
