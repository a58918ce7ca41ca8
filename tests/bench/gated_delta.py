"""Gated delta layers at the shape of Qwen3.5-35B-A3B, as launched in a step and in a prompt, against their floor.

    python -m tests.bench.gated_delta [--rows 1 4 16 64] [--tokens 128 1024 8192] [--window 1] [--json FILE]

The layers follow each other in one graph, each with states of its own, so no state is in a cache. The floor of a step
is one read and one write of every state and window, and one read of the inputs, divided by the copy bandwidth of the
same run. The floor of a prompt is the operations of its chunks divided by the rate of large products. The times of the
kernels are from the profiler, without a graph.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from common.engine.ops.delta_extend import delta_extend
from common.engine.ops.delta_step import delta_step
from common.engine.ops.delta_tiles import CHUNK
from tests.bench.environment import describe
from tests.bench.timing import copy_bandwidth, graph_us, kernels_us, matmul_rate, wake

KEY_HEADS, HEADS, KEY, VALUE = 16, 32, 128, 128
CHANNELS = 2 * KEY_HEADS * KEY + HEADS * VALUE
INPUTS = CHANNELS + 2 * HEADS
EPS = 1e-6
BF16 = torch.bfloat16


@dataclass(frozen=True)
class Row:
    what: str  # step or prompt
    size: int  # requests of a step, tokens of a prompt
    us: float  # per layer
    floor_us: float
    kernels: dict[str, float]  # each kernel's part of it


def made(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=dtype)


def weights() -> tuple[Tensor, Tensor, Tensor, Tensor, float]:
    float32 = torch.float32
    one = (made(HEADS, dtype=float32), made(HEADS, dtype=float32), made(VALUE, dtype=float32))
    return made(CHANNELS, 4), *one, EPS


def planes(slots: int) -> tuple[Tensor, Tensor]:
    return made(slots, CHANNELS, 3), made(slots, HEADS, KEY, VALUE, dtype=torch.float32)


def step(rows: int, window: int, layers: int, bandwidth: float) -> Row:
    index = torch.arange(1, rows + 1, device="cuda")
    pending = torch.full_like(index, window)
    projected = made(rows * window, INPUTS + HEADS * VALUE)
    kept = [(*planes(rows + 1), made(rows + 1, window, INPUTS)) for _ in range(layers)]
    parameters = weights()

    def run() -> None:
        for conv, recurrent, windows in kept:
            delta_step(projected, *parameters, conv, recurrent, windows, index, index, pending)

    conv, recurrent, windows = kept[0]
    moved = 2 * sum(each[1:].nbytes for each in (conv, recurrent, windows)) + projected.nbytes
    floor = 1e6 * moved / bandwidth
    return Row("step", rows, graph_us([run], 1) / layers, floor, kernels_us(run, layers))


def prompt(tokens: int, layers: int, rate: float) -> Row:
    starts = torch.tensor([0, tokens], dtype=torch.int32, device="cuda")
    slot = torch.ones(1, dtype=torch.int64, device="cuda")
    projected, parameters = made(tokens, INPUTS + HEADS * VALUE), weights()
    kept = [planes(2) for _ in range(layers)]

    def run() -> None:
        for conv, recurrent in kept:
            delta_extend(projected, *parameters, conv, recurrent, slot, starts, starts[1:])

    # Per token and head: two products with the state, its update, three inside the chunk, and two of the solution.
    each = 2 * (3 * KEY * VALUE + CHUNK * (2 * KEY + VALUE) + CHUNK * (KEY + VALUE))
    floor = 1e6 * tokens * HEADS * each / rate
    return Row("prompt", tokens, graph_us([run], 1) / layers, floor, kernels_us(run, layers))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--tokens", type=int, nargs="+", default=[128, 1024, 8192])
    parser.add_argument("--window", type=int, default=1)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    bandwidth, rate = copy_bandwidth(), matmul_rate()
    calls = [partial(step, rows, options.window, options.layers, bandwidth) for rows in options.rows]
    calls += [partial(prompt, tokens, options.layers, rate) for tokens in options.tokens]
    found = []
    for call in calls:
        wake()
        row = call()
        found.append(row)
        times = row.us / row.floor_us
        print(
            f"{row.what:6s} {row.size:5d} {row.us:9.1f} us, {times:7.3f} of the floor of {row.floor_us:.1f} us:",
            ", ".join(f"{name} {us:.1f}" for name, us in row.kernels.items()),
        )
    if options.json:
        report = {"environment": describe(), "options": vars(options), "rows": [asdict(row) for row in found]}
        options.json.write_text(json.dumps(report, indent=2, default=str) + "\n")


if __name__ == "__main__":
    main()
