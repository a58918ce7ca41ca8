"""Tiles of FP8 products of few rows: each product of a layer by itself, in all divisions that fit.

    python -m tests.bench.fp8_tiles [--shape llama-3.1-70b --ranks 2] [--rows 1 16 32 64 256] [--channels] [--json FILE]

The matrices are those of one of the ranks that share a layer. Kernels are compiled by processes of their own first. A
product is measured in a graph of 24 launches over weights that exceed the L2 cache together; the output projection and
the down projection include the norm that adds up their parts. Gates and up projections have one accumulator if several
steps are added up together (`fp8_gated_triton`), else one each.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.engine.ops.fp8_codes import FP8, GROUP
from common.engine.ops.fp8_gated import fp8_gated_triton
from common.engine.ops.fp8_product import fp8_product_parts, fp8_product_triton
from common.engine.ops.fp8_rms_norm import fp8_add_parts_rms_norm_triton, fp8_add_rms_norm_triton
from common.engine.ops.fp8_rows import quantize_rows_triton
from common.engine.ops.fp8_tiles import Fp8Tiles
from common.engine.ops.triton_kernel import cdiv, multiprocessors, next_power_of_2
from tests.bench.environment import describe
from tests.bench.shapes import LLAMA, LLAMAS
from tests.bench.timing import copy_bandwidth, graph_us, sets_for, wake

SUMMED, GATED = ("o", "down"), "gate_up"
SHARED = 225 << 10
MAX_SUMS = 128 * 256  # limit per program, in registers
KINDS = [  # (columns, depth, warps, stages)
    (64, 128, 4, 4),
    (64, 128, 4, 6),
    (64, 128, 4, 8),
    (64, 256, 4, 3),
    (64, 256, 4, 4),
    (128, 128, 8, 4),
    (128, 128, 8, 6),
    (128, 256, 8, 3),
]
LARGE = [
    (64, 128, 4, 8),
    (128, 128, 8, 4),
    (128, 128, 8, 3),
    (128, 128, 4, 4),
    (64, 128, 4, 4),
    (256, 128, 8, 3),
]
BF16 = torch.bfloat16


Matrices = dict[str, tuple[int, int]]


def matrices_of(shape: str, ranks: int) -> Matrices:
    """Return the sizes and depths of one rank's matrices of a layer."""
    whole = LLAMAS[shape]
    hidden, inter, heads = whole.hidden, whole.inter // ranks, whole.heads // ranks
    kv_heads, head = whole.kv_heads // ranks, whole.head_dim
    return {
        "qkv": ((heads + 2 * kv_heads) * head, hidden),
        "o": (hidden, heads * head),
        "gate_up": (2 * inter, hidden),
        "down": (hidden, inter),
    }


@dataclass(frozen=True)
class Case:
    """A product in one division."""

    name: str
    rows: int
    blocks: bool
    tiles: Fp8Tiles


def cases(matrices: Matrices, rows: int, together: list[int], processors: int) -> Iterator[Case]:
    room = max(16, next_power_of_2(rows))
    for name, (size, depth) in matrices.items():
        for kind in KINDS if rows <= 64 else LARGE:
            for room_of_tile in sorted({min(room, 128), min(room, 256)}):
                tiles = Fp8Tiles(*kind, room_of_tile, bulk=rows > 16)
                for sums in together:
                    if name != GATED or sums == 1 or depth % (sums * tiles.depth) == 0:
                        yield from _cases(name, size, rows, tiles._replace(together=sums), processors)


def _cases(name: str, size: int, rows: int, tiles: Fp8Tiles, processors: int) -> Iterator[Case]:
    weights = 2 if name == GATED else 1
    if (
        tiles.shared_bytes(weights if tiles.together == 1 else 1) > SHARED
        or weights * tiles.rows * tiles.columns > MAX_SUMS
    ):
        return
    programs = cdiv(size // weights, tiles.columns) * cdiv(rows, tiles.rows)
    divided = name in SUMMED and rows <= 64
    # One program per multiprocessor, or two.
    wanted = {max(processors // programs, 1), max(2 * processors // programs, 1)} if divided else {1}
    for parts in sorted(wanted):
        for blocks in (False, True):
            if (not blocks or (tiles.depth, tiles.together) == (GROUP, 1)) and parts <= 8:
                yield Case(name, rows, blocks, tiles._replace(parts=parts))


def made(size: int, depth: int) -> Tensor:
    return torch.randn(size, depth, device="cuda").to(FP8)


class Inputs:
    """Weights and rows that all cases share."""

    def __init__(self, matrices: Matrices, hidden: int, most: int) -> None:
        self._matrices = matrices
        self._weights = {
            name: [made(*shape) for _ in range(min(sets_for(shape[0] * shape[1]), most))]
            for name, shape in matrices.items()
        }
        self._given: dict[tuple[str, int, bool], tuple[Tensor, Tensor, Tensor]] = {}
        self._gain = torch.randn(hidden, device="cuda").to(BF16)

    def calls(self, case: Case) -> list[partial[tuple[Tensor, ...]]]:
        codes, row_scales, scales = self._inputs(case)
        return [
            partial(self._run, case, codes, row_scales, weight, scales) for weight in self._weights[case.name]
        ]

    def _inputs(self, case: Case) -> tuple[Tensor, Tensor, Tensor]:
        key = case.name, case.rows, case.blocks
        if key not in self._given:
            size, depth = self._matrices[case.name]
            x = torch.randn(case.rows, depth, device="cuda").to(BF16)
            shape = (cdiv(size, GROUP), cdiv(depth, GROUP)) if case.blocks else (size,)
            scales = torch.rand(shape, device="cuda") / depth**0.5
            self._given[key] = (*quantize_rows_triton(x, case.blocks), scales)
        return self._given[key]

    def _run(
        self, case: Case, codes: Tensor, row_scales: Tensor, weight: Tensor, scales: Tensor
    ) -> tuple[Tensor, ...]:
        if case.name == GATED:
            return (fp8_gated_triton(codes, row_scales, weight, scales, case.tiles, BF16, "silu"),)
        given = codes, row_scales, weight, scales, None, case.tiles
        if case.name not in SUMMED:
            return (fp8_product_triton(*given, BF16),)
        stream = self._gain.expand(case.rows, -1)
        rest = stream.contiguous(), self._gain, 1e-5, case.blocks
        if case.tiles.parts == 1:
            return fp8_add_rms_norm_triton(fp8_product_triton(*given, BF16), *rest)
        return fp8_add_parts_rms_norm_triton(fp8_product_parts(*given), *rest)


def compile_cases(
    matrices: Matrices, hidden: int, wanted: list[Case], share: int, count: int, seconds: float
) -> None:
    inputs, end = Inputs(matrices, hidden, 1), time.monotonic() + seconds
    for case in wanted[share::count]:
        if time.monotonic() > end:
            print("not everything was compiled early")
            break
        try:
            inputs.calls(case)[0]()
            torch.cuda.synchronize()
        except Exception as error:
            print(f"{case}: {str(error)[:200]}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default=LLAMA, choices=LLAMAS)
    parser.add_argument("--ranks", type=int, default=1)
    names = list(matrices_of(LLAMA, 1))
    parser.add_argument("--matrices", nargs="+", default=names, choices=names)
    parser.add_argument("--together", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--channels", action="store_true", help="leave out scales per block")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 32, 64, 256])
    parser.add_argument("--seconds", type=float, default=60.0, help="to compile, and to measure")
    parser.add_argument("--processes", type=int, default=max((os.cpu_count() or 2) - 2, 1))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    begun = time.monotonic()
    processors = multiprocessors(torch.device("cuda"))
    matrices = {name: matrices_of(options.shape, options.ranks)[name] for name in options.matrices}
    hidden = LLAMAS[options.shape].hidden
    wanted = [
        case
        for rows in options.rows
        for case in cases(matrices, rows, options.together, processors)
        if not (options.channels and case.blocks)
    ]
    context = multiprocessing.get_context("spawn")
    workers = [
        context.Process(
            target=compile_cases, args=(matrices, hidden, wanted, share, options.processes, options.seconds)
        )
        for share in range(options.processes)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    print(f"{len(wanted)} cases compiled after {time.monotonic() - begun:.0f} s", flush=True)
    inputs, bandwidth, begun = Inputs(matrices, hidden, 8), copy_bandwidth(), time.monotonic()
    found: list[dict[str, Any]] = []
    wake()
    for case in wanted:
        if time.monotonic() - begun > options.seconds:
            print(f"{len(wanted) - len(found)} cases left out")
            break
        size, depth = matrices[case.name]
        try:
            us = graph_us(inputs.calls(case))
        except Exception as error:
            print(f"{case}: {str(error)[:200]}", flush=True)
            continue
        found.append({**asdict(case), "us": us, "floor_us": 1e6 * size * depth / bandwidth})
    for rows in options.rows:
        for name in matrices:
            for blocks in (False, True):
                best = sorted(
                    (
                        each
                        for each in found
                        if (each["rows"], each["name"], each["blocks"]) == (rows, name, blocks)
                    ),
                    key=lambda each: each["us"],
                )[:4]
                if best:
                    print(rows, name, "blocks" if blocks else "channels", f"floor {best[0]['floor_us']:.1f}")
                for each in best:
                    print(f"    {each['us']:6.1f} {tuple(each['tiles'])}")
    if options.json:
        options.json.write_text(
            json.dumps({"environment": describe(), "bandwidth": bandwidth, "cases": found}) + "\n"
        )


if __name__ == "__main__":
    main()
