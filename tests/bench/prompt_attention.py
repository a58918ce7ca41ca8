"""Attention of prompts over pages: the kernel for Hopper GPUs, the one for others, and cuDNN without pages.

    python -m tests.bench.prompt_attention [--heads 32 8 128] [--requests 1] [--new 64 512 2048] [--cached 0 8192 32768]
        [--json FILE]

One prompt of `new` tokens after `cached` ones. `--requests` are the rows of the page table, of which all but one have
no tokens, as in a graph without breaks. cuDNN runs where nothing is cached; its numbers of tokens have to be known in
advance. The last two ways read pages in FP8, as they are and after conversion. Each call is one of 24 in a graph; times
are medians in microseconds.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from common.engine.attention.whole_prompt import attend_whole_prompt
from common.engine.ops.converted_attention import converted_attention_cuda
from common.engine.ops.extend_attention import extend_triton
from common.engine.ops.fp8_codes import FP8
from common.engine.ops.hopper_attention import hopper_extend
from tests.bench.environment import describe
from tests.bench.timing import graph_us, wake

PAGE = 16
BF16 = torch.bfloat16


def ways(
    new: int, cached: int, requests: int, heads: tuple[int, int, int]
) -> dict[str, Callable[[], object]]:
    """Return calls that compute the same prompt, by name."""
    count, kv_heads, head_dim = heads
    pages = -(-(new + cached) // PAGE)
    planes = [torch.randn(pages + 1, PAGE, kv_heads, head_dim, device="cuda").to(BF16) for _ in range(2)]
    table = torch.zeros(requests, pages, dtype=torch.int32, device="cuda")
    table[0] = torch.randperm(pages) + 1
    starts = torch.full((requests + 1,), new, dtype=torch.int32, device="cuda")
    starts[0] = 0
    lengths = torch.zeros(requests, dtype=torch.int32, device="cuda")
    lengths[0] = new + cached
    query = torch.randn(new, count, head_dim, device="cuda").to(BF16)
    keys, values = planes
    given, scale = (query, keys, values, table, starts, lengths), head_dim**-0.5
    found: dict[str, Callable[[], object]] = {
        "hopper": partial(hopper_extend, *given, scale),
        "other": partial(extend_triton, *given, None, scale),
    }
    stored = [plane.to(FP8) for plane in planes]
    eight = query, stored[0], stored[1], table, starts, lengths
    if cached:
        found["other, undivided"] = partial(extend_triton, *given, None, scale, splits=1)
    if cached == 0 and head_dim <= 128:
        own = [torch.randn(new, kv_heads, head_dim, device="cuda").to(BF16) for _ in range(2)]
        found["cudnn"] = partial(attend_whole_prompt, query, own[0], own[1], scale)
    found["fp8"] = partial(extend_triton, *eight, None, scale)
    found["converted"] = partial(converted_attention_cuda, *eight, scale, 1.0, 1.0)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--heads", type=int, nargs=3, default=(32, 8, 128), help="query, KV, and head_dim")
    parser.add_argument("--requests", type=int, default=1)
    parser.add_argument("--new", type=int, nargs="+", default=[16, 64, 256, 512, 1024, 2048, 4096, 8192])
    parser.add_argument("--cached", type=int, nargs="+", default=[0, 1024, 8192, 32768])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    heads: tuple[int, int, int] = tuple(options.heads)
    rows: list[dict[str, Any]] = []
    wake()
    for new, cached in itertools.product(options.new, options.cached):
        us = {name: graph_us([way]) for name, way in ways(new, cached, options.requests, heads).items()}
        flops = 4 * heads[0] * heads[2] * (new * cached + new * (new + 1) / 2)
        rows.append({"new": new, "cached": cached, "us": us})
        shown = "   ".join(f"{name} {time:8.1f} ({flops / time / 1e6:3.0f})" for name, time in us.items())
        print(f"{new:6} after {cached:6}: us (TFLOP/s)  {shown}", flush=True)
    if options.json:
        setup = {"heads": heads, "requests": options.requests, "page": PAGE}
        options.json.write_text(json.dumps({"environment": describe(), **setup, "rows": rows}) + "\n")


if __name__ == "__main__":
    main()
