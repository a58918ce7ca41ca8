"""Decode and verify attention as launched in a layer, between the rotary kernel and a norm, with other divisions.

    python -m tests.bench.layer_attention [--batches 1 4 16 32 64] [--keys 1152] [--json FILE]

Consecutive calls of one attention kernel overlap as they never do in a step. So a layer's neighbouring kernels are
measured with it, then by themselves, and subtracted. As in a step, keys and outputs are not in the L2 cache: every call
has its own planes.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from common.engine.ops.decode_attention import decode_triton
from common.engine.ops.key_parts import Division
from common.engine.ops.rms_norm import add_rms_norm
from common.engine.ops.rotary import rotary_angles
from common.engine.ops.rotary_kv_write import rotary_kv_write
from common.engine.ops.verify_attention import verify_triton
from tests.bench.environment import describe
from tests.bench.ops import DIM, HEADS, HIDDEN, KV_HEADS, PAGE, SCALE, Pages, bf16
from tests.bench.timing import copy_bandwidth, graph_us, wake

LAYERS = 32
BOUND = 8192  # bound of a request's length, as known to a node
Attend = Callable[[Tensor, Tensor, Pages], Tensor]  # (query, planes, pages) -> [rows, heads, D]


@dataclass(frozen=True)
class Row:
    variant: str
    batch: int
    us: float
    floor_us: float


def layer_us(batch: int, new: int, pages: Pages, attend: Attend | None) -> float:
    """Return the microseconds of rotary, attention (or none) and norm for `new` tokens per request."""
    length = int(pages.lengths[0])
    places = torch.arange(length - new, length, device="cuda")
    slots = (pages.table[:, places // PAGE].long() * PAGE + places % PAGE).view(-1)
    inv_freq = 500000.0 ** (-torch.arange(0, DIM, 2, device="cuda") / DIM)
    angles = rotary_angles(places.repeat(batch), inv_freq, 1.0, torch.bfloat16)
    qkv, residual = bf16(batch * new, HEADS + 2 * KV_HEADS, DIM), bf16(batch * new, HIDDEN)
    weight = bf16(HIDDEN)

    def layer(planes: Tensor) -> None:
        cos, sin = angles
        rotary_kv_write(qkv, cos, sin, None, None, 1e-6, planes[0], planes[1], slots)
        out = residual if attend is None else attend(qkv[:, :HEADS], planes, pages)
        add_rms_norm(out.view(-1, HIDDEN), residual, weight, 1e-5)

    return graph_us([partial(layer, planes) for planes in pages.planes], LAYERS)


def decode(query: Tensor, planes: Tensor, pages: Pages, division: Division | None = None) -> Tensor:
    return decode_triton(
        query, planes[0], planes[1], pages.table, pages.lengths, BOUND, None, SCALE, division=division
    )


def verify(query: Tensor, planes: Tensor, pages: Pages, mask: Tensor, division: Division | None) -> Tensor:
    key, value = planes
    args = pages.table, pages.lengths, mask, BOUND, None, SCALE
    return verify_triton(query, key, value, *args, division=division)


def variants(batch: int) -> Iterator[tuple[str, int, Attend | None]]:
    """Yield (name, new tokens, attention)."""
    heads = batch * KV_HEADS
    parts = sorted({max(1, min(n * 132 // heads, 32)) for n in (1, 2, 3, 4)})
    yield "decode, without attention", 1, None
    yield "decode, served", 1, decode
    for splits in parts:
        for keys, stages in ((32, 4), (64, 2), (64, 3), (128, 2)):
            division = Division(splits, keys, stages)
            yield f"decode {tuple(division)}", 1, partial(decode, division=division)
    mask = torch.ones(4, 4, dtype=torch.bool, device="cuda").tril().expand(batch, -1, -1)
    yield "verify, without attention", 4, None
    yield "verify, served", 4, partial(verify, mask=mask, division=None)
    for splits in parts:
        for keys, stages in ((32, 4), (64, 2), (64, 3), (128, 2)):
            division = Division(splits, keys, stages)
            yield f"verify {tuple(division)}", 4, partial(verify, mask=mask, division=division)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16, 32, 64])
    parser.add_argument("--keys", type=int, default=1152)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    bandwidth = copy_bandwidth()
    found = []
    wake()
    for batch in options.batches:
        pages = Pages(batch, options.keys, most=LAYERS)
        floor = 1e6 * pages.nbytes / bandwidth
        alone = 0.0
        for name, new, attend in variants(batch):
            us = layer_us(batch, new, pages, attend)
            alone = us if attend is None else alone
            found.append(Row(name, batch, us - alone if attend is not None else us, floor))
            print(f"{batch:4d} {found[-1].us:8.2f} us, floor {floor:7.2f}  {name}", flush=True)
    if options.json:
        report = {"environment": describe(), "options": vars(options), "rows": [asdict(row) for row in found]}
        options.json.write_text(json.dumps(report, indent=2, default=str) + "\n")


if __name__ == "__main__":
    main()
