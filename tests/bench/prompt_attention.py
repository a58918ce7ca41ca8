"""Attention of prompts over pages: the kernel for Hopper GPUs, the one for others, and cuDNN without pages.

    python -m tests.bench.prompt_attention [--heads 32 8 128] [--requests 1] [--new 64 512 2048] [--cached 0 8192 32768]
        [--batch 64:32768 1984:0] [--json FILE]

One prompt of `new` tokens after `cached` ones. `--batch`, which can be repeated, measures several prompts of a forward
instead. `--requests` are the rows of the page table, of which the others have no tokens, as in a graph without breaks.
cuDNN runs where nothing is cached; its numbers of tokens have to be known in advance. The last two ways read pages in
FP8, as they are and after conversion. Each call is one of 24 in a graph; times are medians in microseconds.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable, Sequence
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


Prompt = tuple[int, int]  # new tokens, cached ones


def prompt(text: str) -> Prompt:
    new, _, cached = text.partition(":")
    return int(new), int(cached)


def ways(
    prompts: Sequence[Prompt], requests: int, heads: tuple[int, int, int]
) -> dict[str, Callable[[], object]]:
    """Return calls that compute the same prompts, by name."""
    count, kv_heads, head_dim = heads
    requests = max(requests, len(prompts))
    pages = [-(-(new + cached) // PAGE) for new, cached in prompts]
    shape = sum(pages) + 1, PAGE, kv_heads, head_dim
    planes = [torch.randn(shape, device="cuda").to(BF16) for _ in range(2)]
    table = torch.zeros(requests, max(pages), dtype=torch.int32, device="cuda")
    for row, taken in enumerate((torch.randperm(sum(pages)) + 1).split(pages)):
        table[row, : len(taken)] = taken
    new = sum(each for each, _ in prompts)
    starts = torch.full((requests + 1,), new, dtype=torch.int32, device="cuda")
    starts[: len(prompts)] = torch.tensor([0, *itertools.accumulate(each for each, _ in prompts)][:-1])
    lengths = torch.zeros(requests, dtype=torch.int32, device="cuda")
    lengths[: len(prompts)] = torch.tensor([sum(each) for each in prompts])
    query = torch.randn(new, count, head_dim, device="cuda").to(BF16)
    keys, values = planes
    given, scale = (query, keys, values, table, starts, lengths), head_dim**-0.5
    found: dict[str, Callable[[], object]] = {
        "hopper": partial(hopper_extend, *given, scale),
        "other": partial(extend_triton, *given, None, scale),
    }
    stored = [plane.to(FP8) for plane in planes]
    eight = query, stored[0], stored[1], table, starts, lengths
    if any(cached for _, cached in prompts):
        found["other, undivided"] = partial(extend_triton, *given, None, scale, programs=1)
    elif len(prompts) == 1 and head_dim <= 128:
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
    parser.add_argument(
        "--batch", type=prompt, nargs="+", action="append", metavar="NEW:CACHED", help="prompts of a forward"
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    heads: tuple[int, int, int] = tuple(options.heads)
    rows: list[dict[str, Any]] = []
    batches = options.batch or [[each] for each in itertools.product(options.new, options.cached)]
    wake()
    for prompts in batches:
        us = {name: graph_us([way]) for name, way in ways(prompts, options.requests, heads).items()}
        pairs = sum(new * cached + new * (new + 1) / 2 for new, cached in prompts)
        rows.append({"prompts": prompts, "us": us})
        rates = ((name, time, 4 * heads[0] * heads[2] * pairs / time / 1e6) for name, time in us.items())
        shown = "   ".join(f"{name} {time:8.1f} ({rate:3.0f})" for name, time, rate in rates)
        label = ", ".join(f"{new} after {cached}" for new, cached in prompts)
        print(f"{label:>20}: us (TFLOP/s)  {shown}", flush=True)
    if options.json:
        setup = {"heads": heads, "requests": options.requests, "page": PAGE}
        options.json.write_text(json.dumps({"environment": describe(), **setup, "rows": rows}) + "\n")


if __name__ == "__main__":
    main()
