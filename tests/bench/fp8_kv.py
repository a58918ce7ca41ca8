"""Decode and verify attention over pages in FP8 and in bf16, on one GPU.

    python -m tests.bench.fp8_kv [--shapes 64x4096 1x8192] [--sweep] [--json FILE]

The floor is the bytes of keys and values at the bandwidth of a device copy.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from common.engine.ops.decode_attention import decode_triton
from common.engine.ops.extend_attention import extend_triton
from common.engine.ops.fp8_codes import FP8
from common.engine.ops.key_parts import Division
from common.engine.ops.rotary_kv_write import rotary_kv_write
from common.engine.ops.verify_attention import verify_triton
from tests.bench.environment import describe
from tests.bench.ops import DIM, HEADS, KV_HEADS, PAGE, SCALE, bf16
from tests.bench.timing import copy_bandwidth, graph_us, wake

DTYPES = {"bf16": torch.bfloat16, "fp8": FP8}


@dataclass(frozen=True)
class Row:
    operation: str
    keys: str  # dtype of the pages
    batch: int
    length: int
    us: float
    floor_us: float


class Pages:
    """B requests of `length` tokens over shuffled pages; two sets of planes, so that the L2 cache does not help."""

    def __init__(self, batch: int, length: int, dtype: torch.dtype) -> None:
        per_request = -(-length // PAGE)
        count = batch * per_request + 1
        self.nbytes = 2 * batch * length * KV_HEADS * DIM * dtype.itemsize
        sets = max(2, -(-(200 << 20) // self.nbytes))
        self.planes = [bf16(2, count, PAGE, KV_HEADS, DIM).to(dtype) for _ in range(sets)]
        order = torch.randperm(count - 1, device="cuda") + 1
        self.table = order.view(batch, per_request).to(torch.int32)
        self.lengths = torch.full((batch,), length, dtype=torch.int32, device="cuda")


def calls(pages: Pages, run: Callable[[Tensor, Tensor], object]) -> float:
    return graph_us([partial(run, keys, values) for keys, values in pages.planes])


def operations(pages: Pages, sweep: bool) -> Iterator[tuple[str, Callable[[Tensor, Tensor], object]]]:
    """Yield (name, call over planes)."""
    batch, length = len(pages.lengths), int(pages.lengths[0])
    query, drafts = bf16(batch, HEADS, DIM), bf16(4 * batch, HEADS, DIM)
    mask = torch.ones(4, 4, dtype=torch.bool, device="cuda").tril().expand(batch, -1, -1)
    where = pages.table, pages.lengths

    def decode(keys: Tensor, values: Tensor, division: Division | None = None, warps: int = 4) -> object:
        args = *where, length, None, SCALE
        return decode_triton(query, keys, values, *args, division=division, num_warps=warps)

    def verify(keys: Tensor, values: Tensor) -> object:
        return verify_triton(drafts, keys, values, *where, mask, length, None, SCALE)

    yield "decode", decode
    yield "verify 4", verify
    if sweep:
        splits = sorted({max(1, n * 132 // (batch * KV_HEADS)) for n in (1, 2, 3)})
        for parts, keys, stages, warps in itertools.product(splits, (32, 64, 128), (2, 3, 4), (4, 8)):
            chosen = partial(decode, division=Division(parts, keys, stages), warps=warps)
            yield f"decode {parts} {keys} {stages} {warps}", chosen


def prompt_rows(name: str) -> Iterator[Row]:
    """Yield a chunk of 2,048 tokens after a prefix, and the write of its keys and values."""
    chunk, length = 2048, 8192
    qkv, cos, sin = bf16(chunk, HEADS + 2 * KV_HEADS, DIM), bf16(chunk, 1, DIM), bf16(chunk, 1, DIM)
    pages = Pages(1, length, DTYPES[name])
    starts = torch.tensor([0, chunk], dtype=torch.int32, device="cuda")
    slots = pages.table[0].repeat_interleave(PAGE)[:chunk].long() * PAGE
    slots += torch.arange(chunk, device="cuda") % PAGE

    def extend(keys: Tensor, values: Tensor) -> object:
        return extend_triton(qkv[:, :HEADS], keys, values, pages.table, starts, pages.lengths, None, SCALE)

    def write(keys: Tensor, values: Tensor) -> None:
        rotary_kv_write(qkv, cos, sin, None, None, 0.0, keys, values, slots)

    yield Row("extend 2048 of 8192", name, 1, length, calls(pages, extend), 0.0)
    yield Row("write 2048", name, 1, length, calls(pages, write), 0.0)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", default=["1x8192", "8x8192", "64x1152", "64x4096"])
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    wake()
    bandwidth, found = copy_bandwidth(), []

    def report(row: Row) -> None:
        found.append(row)
        share = f"{row.us / row.floor_us:.2f}" if row.floor_us else ""
        print(
            f"{row.batch:4d} x {row.length} {row.keys:5s} {row.us:9.2f} us {share:5s} {row.operation}",
            flush=True,
        )

    for shape, (name, dtype) in itertools.product(options.shapes, DTYPES.items()):
        batch, length = map(int, shape.split("x"))
        pages = Pages(batch, length, dtype)
        floor = 1e6 * pages.nbytes / bandwidth
        for operation, run in operations(pages, options.sweep and name == "fp8"):
            report(Row(operation, name, batch, length, calls(pages, run), floor))
    for row in itertools.chain.from_iterable(map(prompt_rows, DTYPES)):
        report(row)
    if options.json:
        rows = [asdict(row) for row in found]
        options.json.write_text(
            json.dumps({"environment": describe(), "rows": rows}, indent=2, default=str) + "\n"
        )


if __name__ == "__main__":
    main()
