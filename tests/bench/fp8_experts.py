"""Experts of a layer in bf16 and in FP8, without router and norm, with random choices.

    python -m tests.bench.fp8_experts [--tokens 1 4 16 64 1024 8192] [--json FILE]

The sizes are those of Qwen3-30B-A3B. The floor is the bytes of the experts that are used, at the copy bandwidth of the
same run.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from common.engine.ops.expert_products import expert_parts
from common.engine.ops.fp8_codes import FP8
from common.engine.ops.fp8_grouped import fp8_expert_parts_triton
from tests.bench.environment import describe
from tests.bench.timing import copy_bandwidth, graph_us, wake

COUNT, CHOSEN, HIDDEN, INNER = 128, 8, 2048, 768
SETS = 2
BF16 = torch.bfloat16


def made(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda").to(BF16) / shape[-1] ** 0.5


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 4, 16, 64, 1024, 8192])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    dense = [(made(COUNT, 2 * INNER, HIDDEN), made(COUNT, HIDDEN, INNER)) for _ in range(SETS)]
    codes = [(gate_up.mul(40).to(FP8), down.mul(40).to(FP8)) for gate_up, down in dense]
    channels = (
        torch.full((COUNT, 2 * INNER), 0.025, device="cuda"),
        torch.full((COUNT, HIDDEN), 0.025, device="cuda"),
    )
    blocks = (
        torch.full((COUNT, 2, INNER // 128, HIDDEN // 128), 0.025, device="cuda"),
        torch.full((COUNT, HIDDEN // 128, INNER // 128), 0.025, device="cuda"),
    )
    bandwidth, found = copy_bandwidth(), []
    wake()
    for tokens in options.tokens:
        x, shares = made(tokens, HIDDEN), torch.rand(tokens, CHOSEN, device="cuda")
        which = torch.rand(tokens, COUNT, device="cuda").topk(CHOSEN).indices.int()
        used = len(which.unique())
        ways = {"bf16": [partial(expert_parts, x, *pair, which, shares) for pair in dense]}
        for name, (of_gates, of_downs) in (("channels", channels), ("blocks", blocks)):
            ways[name] = [
                partial(fp8_expert_parts_triton, x, gate_up, of_gates, down, of_downs, None, which, shares)
                for gate_up, down in codes
            ]
        for name, calls in ways.items():
            us, itemsize = graph_us(calls), 2 if name == "bf16" else 1
            floor = 1e6 * used * 3 * INNER * HIDDEN * itemsize / bandwidth
            found.append({"tokens": tokens, "variant": name, "us": us, "floor_us": floor})
            print(f"{tokens:5d} {us:8.1f} us {us / floor:6.2f} of the floor  {name}", flush=True)
    if options.json:
        options.json.write_text(json.dumps({"environment": describe(), "rows": found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
