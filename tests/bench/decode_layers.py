"""The kernels of a decoder layer with experts in a step of few requests, with other tiles and forms.

    python -m tests.bench.decode_layers [--rows 1 4 16] [--shape qwen3-30b-a3b] [--layers 12] [--json FILE]
    python -m tests.bench.decode_layers --without [--rows 4 16]     what each phase of a layer takes

All layers follow each other in one graph with weights of their own, so that the same kernels overlap as in a step. One
kernel at a time is varied while the others stay as they are served. Every variant is first compared with the torch
references, kernel by kernel on the inputs that it gets; one that fails is reported and left out. With `--without`,
phases are left out instead: the next one reads what an earlier step wrote, so the difference is what a phase takes
where it is, with the wait for its results. `--compile I N` only runs every N-th variant once, to compile kernels early.
"""

from __future__ import annotations

import argparse
import json
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from common.engine.ops.decode_attention import decode_triton
from common.engine.ops.delta_step import delta_step
from common.engine.ops.expert_products import expert_parts_reference, few_pairs_triton
from common.engine.ops.expert_tiles import ExpertTiles, choose_few
from common.engine.ops.expert_vectors import DOWN_VECTORS, UP_VECTORS, pair_vectors_triton
from common.engine.ops.linear import linear_parts, linear_triton
from common.engine.ops.rms_norm import add_parts_rms_norm_triton, add_rms_norm_reference, add_rms_norm_triton
from common.engine.ops.rotary_kv_write import rotary_kv_write
from common.engine.ops.route import route_reference, route_triton
from common.engine.ops.shared_memory import H200
from common.engine.ops.sum_parts import sum_parts_rms_norm, sum_parts_rms_norm_reference
from common.engine.ops.tiles import Tiles, choose_tiles, divide_depth
from common.engine.ops.vector_products import MAX_ROWS, VectorTiles, choose_vectors, vector_linear_triton
from tests.bench.environment import describe
from tests.bench.timing import copy_bandwidth, graph_us, wake

EPS, PAGE, KEYS = 1e-6, 16, 1024
LIBRARY = "library"
H200_PROCESSORS = 132
Way = Tiles | VectorTiles | ExpertTiles | str
BF16, DEVICE = torch.bfloat16, "cuda"
KEY_HEADS, DELTA_HEADS, DIM = 16, 32, 128  # in gated delta layers
CHANNELS = (2 * KEY_HEADS + DELTA_HEADS) * DIM
PHASES = ("projection", "mixer", "output", "routing", "up", "down", "sum")
TOGETHER = (PHASES[:3], ("up", "down"), PHASES[3:])  # phases that are left out together
Floors = dict[str, float]  # phase -> us


@dataclass(frozen=True)
class Shape:
    """A layer. Without KV heads it is a gated delta layer."""

    hidden: int
    experts: int
    chosen: int
    inner: int
    shared: int
    heads: int
    kv_heads: int

    @property
    def mixed(self) -> int:
        """Output width of the mixer."""
        return self.heads * DIM

    @property
    def projected(self) -> int:
        if self.kv_heads:
            return (self.heads + 2 * self.kv_heads) * DIM
        return CHANNELS + 2 * DELTA_HEADS + self.mixed


SHAPES = {
    "qwen3-30b-a3b": Shape(2048, 128, 8, 768, 0, 32, 4),
    "qwen3.5-35b-a3b": Shape(2048, 256, 8, 512, 1, DELTA_HEADS, 0),
}


@dataclass(frozen=True)
class Ways:
    """How each product of a layer is computed."""

    into: Way  # into the mixer
    out: Way
    up: Way
    down: Way
    without: tuple[str, ...] = ()  # phases that are left out

    @classmethod
    def by_matrix_units(cls, shape: Shape, rows: int) -> Ways:
        used = min(rows * (shape.chosen + shape.shared), shape.experts + shape.shared)
        gpu = H200_PROCESSORS, H200.shared_bytes
        up = choose_few(rows, used, shape.inner, 2, True, *gpu)
        down = choose_few(rows, used, shape.hidden, 2, False, *gpu)
        out = divide_depth(rows, shape.hidden, shape.mixed, *gpu)
        return cls(choose_tiles(rows, shape.projected, *gpu) or LIBRARY, out or LIBRARY, up, down)

    @classmethod
    def served(cls, shape: Shape, rows: int) -> Ways:
        ways = cls.by_matrix_units(shape, rows)
        into = choose_vectors(rows, shape.projected, shape.hidden) or ways.into
        out = choose_vectors(rows, shape.hidden, shape.mixed) or ways.out
        if rows > 1:
            return replace(ways, into=into, out=out)
        return cls(into, out, UP_VECTORS, DOWN_VECTORS)


class Results(NamedTuple):
    """What the phases of a layer wrote in an earlier step, for variants without one of them."""

    projected: Tensor
    mixed: Tensor
    normed: tuple[Tensor, Tensor]
    choice: tuple[Tensor, Tensor]
    inner: Tensor
    parts: Tensor


@dataclass(frozen=True)
class Row:
    variant: str
    rows: int
    us: float  # per layer
    floor_us: float


def made(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=BF16, device=DEVICE).normal_(std=shape[-1] ** -0.5)


def product(x: Tensor, weight: Tensor, way: Way) -> Tensor:
    if isinstance(way, Tiles):
        return linear_triton(x, weight, None, way)
    if isinstance(way, VectorTiles):
        return vector_linear_triton(x, weight, None, way)
    return F.linear(x, weight)


def near(found: Tensor, expected: Tensor, what: str) -> None:
    wrong = float((found.float() - expected.float()).norm() / expected.float().norm())
    assert wrong < 0.01, f"{what} is wrong by {wrong}"


class Layer:
    """Weights, pages and states of one layer."""

    def __init__(self, shape: Shape, rows: int, weights: dict[str, Tensor]) -> None:
        self.shape, self.rows = shape, rows
        self.into, self.out, self.router = weights["into"], weights["out"], weights["router"]
        self.gate_up, self.down, self.gain = weights["gate_up"], weights["down"], weights["gain"]
        self.results: Results | None = None
        pages = rows * KEYS // PAGE + 1
        if shape.kv_heads:
            plane = pages, PAGE, shape.kv_heads, DIM
            self.planes = made(*plane), made(*plane)
            self.table = torch.arange(1, pages, device=DEVICE, dtype=torch.int32).view(rows, -1)
            self.lengths = torch.full((rows,), KEYS, device=DEVICE, dtype=torch.int32)
            self.slots = self.table[:, -1].long() * PAGE + PAGE - 1
            self.angles = made(rows, 1, DIM), made(rows, 1, DIM)
            self.norm = made(DIM)
        else:
            self.index = torch.arange(1, rows + 1, device=DEVICE)
            decay, bias = torch.randn(2, DELTA_HEADS, device=DEVICE)
            self.delta = made(CHANNELS, 4), decay, bias, torch.randn(DIM, device=DEVICE), EPS
            self.conv = made(rows + 1, CHANNELS, 3)
            self.recurrent = torch.randn(rows + 1, DELTA_HEADS, DIM, DIM, device=DEVICE) * 0.1
            self.window = made(rows + 1, 1, CHANNELS + 2 * DELTA_HEADS)
            self.pending = torch.ones_like(self.index)

    @staticmethod
    def weights(shape: Shape) -> dict[str, Tensor]:
        total = shape.experts + shape.shared
        return {
            "into": made(shape.projected, shape.hidden),
            "out": made(shape.hidden, shape.mixed),
            "router": made(shape.experts + shape.shared, shape.hidden) * 4,
            "gate_up": made(total, 2 * shape.inner, shape.hidden),
            "down": made(total, shape.hidden, shape.inner),
            "gain": torch.ones(shape.hidden, dtype=BF16, device=DEVICE),
        }

    @property
    def moved(self) -> int:
        """Bytes of keys and values, or of states, that a step reads and writes."""
        if self.shape.kv_heads:
            return sum(plane.nbytes for plane in self.planes)
        return 2 * (self.recurrent[1:].nbytes + self.conv[1:].nbytes + self.window[1:].nbytes)

    def mix(self, projected: Tensor) -> Tensor:
        shape = self.shape
        if not shape.kv_heads:
            planes = self.conv, self.recurrent, self.window
            return delta_step(projected, *self.delta, *planes, self.index, self.index, self.pending)
        qkv = projected.view(-1, shape.heads + 2 * shape.kv_heads, DIM)
        rotary_kv_write(qkv, *self.angles, self.norm, self.norm, EPS, *self.planes, self.slots)
        query = qkv[:, : shape.heads]
        return decode_triton(query, *self.planes, self.table, self.lengths, 8192, None, DIM**-0.5).flatten(1)

    def end_mixer(self, mixed: Tensor, stream: Tensor, way: Way) -> tuple[Tensor, Tensor]:
        if isinstance(way, Tiles) and way.parts > 1:
            return add_parts_rms_norm_triton(linear_parts(mixed, self.out, None, way), stream, self.gain, EPS)
        return add_rms_norm_triton(product(mixed, self.out, way), stream, self.gain, EPS)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return route_triton(x, self.router, *self.rule)

    @property
    def rule(self) -> tuple[None, None, int, int, int, bool, bool, int, int, bool, float, float]:
        shared = self.shape.shared
        return None, None, 0, self.shape.chosen, shared, shared > 0, False, 1, 1, True, 0.0, 1.0

    def pairs(
        self, x: Tensor, stack: Tensor, experts: Tensor, shares: Tensor, gated: bool, way: Way
    ) -> Tensor:
        if isinstance(way, VectorTiles):
            return pair_vectors_triton(x, stack, experts, shares, gated, way)
        assert isinstance(way, ExpertTiles)
        return few_pairs_triton(x, stack, experts, shares, gated, way)

    def run(self, x: Tensor, stream: Tensor, ways: Ways, check: bool = False) -> tuple[Tensor, Tensor]:
        if ways.without:
            return self._run_without(x, stream, ways)
        projected = product(x, self.into, ways.into)
        if check:
            near(projected, F.linear(x, self.into), "the projection")
        mixed = self.mix(projected)
        x, after = self.end_mixer(mixed, stream, ways.out)
        if check:
            expected = add_rms_norm_reference(F.linear(mixed, self.out), stream, self.gain, EPS)
            near(x, expected[0], "the norm")
            near(after, expected[1], "the stream")
        experts, shares = self.route(x)
        if check:
            expected_experts, expected_shares = route_reference(x, self.router, *self.rule)
            same = (experts == expected_experts).all(1)
            assert same.double().mean() >= 0.75, f"experts {experts} instead of {expected_experts}"
            near(shares[same], expected_shares[same], "the shares")
        inner = self.pairs(x, self.gate_up, experts, shares, True, ways.up)
        parts = self.pairs(inner, self.down, experts, shares, False, ways.down).view(*experts.shape, -1)
        if check:
            near(parts, expert_parts_reference(x, self.gate_up, self.down, experts, shares), "the parts")
        out = sum_parts_rms_norm(parts, experts, after, self.gain, EPS)
        if check:
            near(out[0], sum_parts_rms_norm_reference(parts, experts, after, self.gain, EPS)[0], "the sum")
        if not self.results:
            # The first step is not recorded in a graph, whose memory others reuse.
            self.results = Results(projected, mixed, (x, after), (experts, shares), inner, parts)
        return out

    def _run_without(self, x: Tensor, stream: Tensor, ways: Ways) -> tuple[Tensor, Tensor]:
        assert self.results is not None, "an earlier step wrote what the phases left out would have"
        projected, mixed, normed, choice, inner, parts = self.results
        if "projection" not in ways.without:
            projected = product(x, self.into, ways.into)
        if "mixer" not in ways.without:
            mixed = self.mix(projected)
        if "output" not in ways.without:
            normed = self.end_mixer(mixed, stream, ways.out)
        x, after = normed
        experts, shares = choice if "routing" in ways.without else self.route(x)
        if "up" not in ways.without:
            inner = self.pairs(x, self.gate_up, experts, shares, True, ways.up)
        if "down" not in ways.without:
            parts = self.pairs(inner, self.down, experts, shares, False, ways.down).view(*experts.shape, -1)
        if "sum" in ways.without:
            return x, after
        return sum_parts_rms_norm(parts, experts, after, self.gain, EPS)


def ablations(base: Ways) -> Iterator[tuple[str, Ways]]:
    """Yield what is served, and the same without each phase and without some together."""
    yield "served", base
    for left_out in (*((each,) for each in PHASES), *TOGETHER):
        yield f"without {', '.join(left_out)}", replace(base, without=left_out)
    yield "served, once more", base


def variants(shape: Shape, rows: int) -> Iterator[tuple[str, Ways]]:
    """Yield what is served, the matrix units for everything, and other tiles of one kernel at a time."""
    units, base = Ways.by_matrix_units(shape, rows), Ways.served(shape, rows)
    yield "served", base
    room = units.up.rows if isinstance(units.up, ExpertTiles) else 16
    ways: dict[str, list[Way]] = {each: [getattr(units, each)] for each in ("into", "out", "up", "down")}
    for columns, depth, stages in ((32, 128, 4), (32, 256, 3), (16, 256, 4), (64, 128, 4)):
        ways["into"].append(Tiles(columns, depth, 4, stages, room))
    for columns, parts in ((64, 4), (64, 2), (32, 2), (32, 4)):
        ways["out"].append(Tiles(columns, 128, 4, 4 if parts < 4 else 6, room, parts))
    for columns, depth, stages in ((32, 128, 4), (64, 128, 3), (64, 128, 4), (64, 64, 6)):
        for each in ("up", "down"):
            ways[each].append(ExpertTiles(columns, depth, room, 4, stages))
    if rows <= MAX_ROWS:
        yield "matrix units", units
        late = VectorTiles(4, 4, early=False)
        yield "weights loaded after the wait", replace(base, into=late, out=late)
        for columns, warps in ((2, 2), (4, 2), (2, 4), (4, 4), (8, 4), (16, 4), (4, 8), (8, 8), (16, 8)):
            for several in ways.values():
                several.append(VectorTiles(columns, warps))
    for each, found in ways.items():
        for way in found:
            if way != getattr(base, each):
                name = way if isinstance(way, str) else f"{type(way).__name__}{tuple(way)}"
                yield f"{each} {name}", replace(base, **{each: way})  # type: ignore[arg-type]
    yield "served, once more", base


class Stack:
    def __init__(self, shape: Shape, layers: int) -> None:
        self.shape = shape
        self.weights = [Layer.weights(shape) for _ in range(layers)]

    def layers(self, rows: int) -> list[Layer]:
        return [Layer(self.shape, rows, each) for each in self.weights]


def run(layers: list[Layer], x: Tensor, ways: Ways) -> Tensor:
    stream = x
    for layer in layers:
        x, stream = layer.run(x, stream, ways)
    return x


def floors_us(layers: list[Layer], x: Tensor, ways: Ways, bandwidth: float) -> Floors:
    """Return by phase the time to read weights, used experts and keys, and to read and write states."""
    stream, used = x, 0
    for layer in layers:
        experts, _ = layer.route(x)
        used += len(experts.unique())
        x, stream = layer.run(x, stream, ways)
    one, each = layers[0], used / len(layers)
    read = one.into.nbytes, one.moved, one.out.nbytes, one.router.nbytes
    nbytes = (*read, each * one.gate_up[0].nbytes, each * one.down[0].nbytes, 0)
    return {phase: 1e6 * count / bandwidth for phase, count in zip(PHASES, nbytes, strict=True)}


def measured(layers: list[Layer], name: str, ways: Ways, x: Tensor, floors: dict[str, float]) -> Row | None:
    floor = sum(us for phase, us in floors.items() if phase not in ways.without)
    try:
        layers[0].run(x, x, ways, check=True)
        us = graph_us([partial(run, layers, x, ways)], 1) / len(layers)
    except Exception as error:  # one variant must not end the others
        print(f"{len(x):3d} failed: {name}: {type(error).__name__} {str(error)[:300]}", flush=True)
        return None
    print(f"{len(x):3d} {us:8.2f} us {us - floor:6.2f} above the floor of {floor:6.2f}  {name}", flush=True)
    return Row(name, len(x), us, floor)


def compile_all(shape: Shape, rows: list[int], index: int, count: int) -> None:
    stack, number = Stack(shape, 1), 0
    for each in rows:
        (layer,), x = stack.layers(each), made(each, shape.hidden) * shape.hidden**0.5
        for _, ways in variants(shape, each):
            number += 1
            if number % count == index:
                try:
                    layer.run(x, x, ways)
                except Exception:
                    traceback.print_exc(limit=2)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-30b-a3b")
    parser.add_argument("--without", action="store_true", help="leave phases out instead of varying products")
    parser.add_argument("--compile", type=int, nargs=2, metavar=("I", "N"))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    shape = SHAPES[options.shape]
    if options.compile:
        compile_all(shape, options.rows, *options.compile)
        return
    stack, bandwidth = Stack(shape, options.layers), copy_bandwidth()
    found: list[Row] = []
    wake()
    for rows in options.rows:
        layers, x = stack.layers(rows), made(rows, shape.hidden) * shape.hidden**0.5
        served = Ways.served(shape, rows)
        floors = floors_us(layers, x, served, bandwidth)
        print(f"{options.shape}, {rows} rows: floor {sum(floors.values()):.1f} us per layer", flush=True)
        for name, ways in ablations(served) if options.without else variants(shape, rows):
            row = measured(layers, name, ways, x, floors)
            found += [row] if row else []
            if options.json:
                measured_rows = [asdict(each) for each in found]
                report = {"environment": describe(), "options": vars(options), "rows": measured_rows}
                options.json.write_text(json.dumps(report, indent=2, default=str) + "\n")


if __name__ == "__main__":
    main()
