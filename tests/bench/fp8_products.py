"""Products of a layer in bf16 and in FP8, by the kernels that are served and by the library.

    python -m tests.bench.fp8_products [--rows 1 4 16 32 64 256 1024 4096] [--layers 32] [--json FILE]
        [--kinds bf16 tensor channels blocks] [--others ALONE=12 CHANNEL_PROGRAMS=2,SHARING=6]

The products of the 8B shape with the norms and the activations between them, all layers in one graph, each with
weights of its own; attention is left out. `--others` are other values of constants of `ops/fp8_tiles`, for what is
served in FP8. FP8 includes the quantisation of every input. The last column divides by the
floor: the bytes of the weights at the copy bandwidth of the same run.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType

from common.engine.ops import fp8_tiles
from common.engine.ops.fp8_codes import FP8, GROUP
from common.engine.ops.fp8_gated import fp8_gated, fp8_gated_triton
from common.engine.ops.fp8_library import library_product
from common.engine.ops.fp8_linear import fp8_product
from common.engine.ops.fp8_linear_norm import fp8_product_norm_quantized
from common.engine.ops.fp8_rms_norm import fp8_add_rms_norm
from common.engine.ops.fp8_rows import quantize_rows
from common.engine.ops.fp8_silu_mul import fp8_gate
from common.engine.ops.linear import gated_linear, linear
from common.engine.ops.linear_norm import linear_add_rms_norm
from common.engine.ops.triton_kernel import COMPILE_ERRORS, cdiv, multiprocessors
from tests.bench.environment import describe
from tests.bench.timing import copy_bandwidth, graph_us, wake

HIDDEN, INNER, QKV, HEADS = 4096, 14336, 6144, 4096
MATRICES = {
    "qkv": (QKV, HIDDEN),
    "o": (HIDDEN, HEADS),
    "gate_up": (2 * INNER, HIDDEN),
    "down": (HIDDEN, INNER),
}
EPS = 1e-5
FAILURES: tuple[type[Exception], ...] = (*COMPILE_ERRORS, AssertionError)
BF16 = torch.bfloat16
Layer = dict[str, Tensor]


@dataclass(frozen=True)
class Row:
    variant: str
    rows: int
    ms: float
    floor_ms: float


class Stack:
    """The weights of all layers: in bf16, or in FP8 with scales per channel, block or tensor."""

    def __init__(self, kind: str, layers: int) -> None:
        self.kind = kind
        self._gain = torch.randn(HIDDEN, device="cuda").to(BF16)
        self._layers = [
            {name: self._weight(*shape) for name, shape in MATRICES.items()} for _ in range(layers)
        ]
        self.nbytes = sum(weight.nbytes for layer in self._layers for weight in layer.values())
        one = torch.ones((), device="cuda")
        self._one = one
        self._scales = {name: self._scale(*shape) for name, shape in MATRICES.items()}

    def _weight(self, size: int, depth: int) -> Tensor:
        values = torch.randn(size, depth, device="cuda") / (depth**0.5 if self.kind == "bf16" else 1.0)
        return values.to(BF16 if self.kind == "bf16" else FP8)

    def _scale(self, size: int, depth: int) -> Tensor:
        shape = (cdiv(size, GROUP), cdiv(depth, GROUP)) if self.kind == "blocks" else (size,)
        return torch.full(shape, depth**-0.5, device="cuda")

    def dense(self, x: Tensor) -> Tensor:
        stream = x
        for layer in self._layers:
            heads = linear(x, layer["qkv"], None)[:, :HEADS].contiguous()
            x, stream = linear_add_rms_norm(heads, layer["o"], None, stream, self._gain, EPS)
            inner = gated_linear(x, layer["gate_up"], None)
            x, stream = linear_add_rms_norm(inner, layer["down"], None, stream, self._gain, EPS)
        return x

    def served(self, x: Tensor) -> Tensor:
        stream, blocks = x, self.kind == "blocks"
        codes, scales = quantize_rows(x, blocks)
        for layer in self._layers:
            heads = fp8_product(codes, scales, layer["qkv"], self._scales["qkv"], None, BF16)[:, :HEADS]
            given = *quantize_rows(heads, blocks), layer["o"], self._scales["o"], None
            codes, scales, stream = fp8_product_norm_quantized(*given, stream, self._gain, EPS, blocks)
            inside = fp8_gated(codes, scales, layer["gate_up"], self._scales["gate_up"], None, "silu", BF16)
            given = *inside, layer["down"], self._scales["down"], None
            codes, scales, stream = fp8_product_norm_quantized(*given, stream, self._gain, EPS, blocks)
        return codes

    def bare(self, x: Tensor) -> Tensor:
        """Do as `served` without quantising the outputs of attention and activation."""
        stream, blocks, rows = x, self.kind == "blocks", x.shape[0]
        codes, scales = quantize_rows(x, blocks)
        wide = quantize_rows(torch.zeros(rows, INNER, device=x.device, dtype=BF16), blocks)
        first = codes, scales
        for layer in self._layers:
            fp8_product(codes, scales, layer["qkv"], self._scales["qkv"], None, BF16)
            given = *first, layer["o"], self._scales["o"], None
            codes, scales, stream = fp8_product_norm_quantized(*given, stream, self._gain, EPS, blocks)
            gpu = multiprocessors(x.device)
            tiles = fp8_tiles.choose_fp8_gated_tiles(rows, *MATRICES["gate_up"], blocks, gpu)
            assert tiles is not None, "too many rows"
            fp8_gated_triton(codes, scales, layer["gate_up"], self._scales["gate_up"], tiles, BF16, "silu")
            given = *wide, layer["down"], self._scales["down"], None
            codes, scales, stream = fp8_product_norm_quantized(*given, stream, self._gain, EPS, blocks)
        return codes

    def library(self, x: Tensor) -> Tensor:
        stream, blocks = x, self.kind == "blocks"
        codes, scales = quantize_rows(x, blocks)
        for layer in self._layers:
            heads = self._by_library(codes, scales, layer, "qkv")[:, :HEADS]
            y = self._by_library(*quantize_rows(heads, blocks), layer, "o")
            codes, scales, stream = fp8_add_rms_norm(y, stream, self._gain, EPS, blocks)
            inside = fp8_gate(self._by_library(codes, scales, layer, "gate_up"), "silu", blocks)
            y = self._by_library(*inside, layer, "down")
            codes, scales, stream = fp8_add_rms_norm(y, stream, self._gain, EPS, blocks)
        return codes

    def _by_library(self, codes: Tensor, scales: Tensor, layer: Layer, name: str) -> Tensor:
        if self.kind == "tensor":
            scale = self._one, ScalingType.TensorWise
            return F.scaled_mm(codes, layer[name].t(), *scale, *scale, output_dtype=BF16, use_fast_accum=True)
        out = library_product(codes, scales, layer[name], self._scales[name], None, BF16)
        assert out is not None, "the library has no such product"
        return out

    def served_with(self, constants: str) -> Callable[[Tensor], Tensor]:
        """Return `served` with other constants, as NAME=NUMBER,NAME=NUMBER."""
        values = {name: int(value) for name, value in (each.split("=") for each in constants.split(","))}

        def run(x: Tensor) -> Tensor:
            before = {name: getattr(fp8_tiles, name) for name in values}
            for name, value in values.items():
                setattr(fp8_tiles, name, value)
            try:
                return self.served(x)
            finally:
                for name, value in before.items():
                    setattr(fp8_tiles, name, value)

        return run

    def ways(self, others: list[str]) -> dict[str, Callable[[Tensor], Tensor]]:
        if self.kind == "bf16":
            return {"served": self.dense}
        if self.kind == "tensor":
            return {"library": self.library}
        tried = {f"served, {each}": self.served_with(each) for each in others}
        return {"served": self.served, "library": self.library, "bare": self.bare, **tried}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 32, 64, 256, 1024, 4096])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--kinds", nargs="+", default=["bf16", "tensor", "channels", "blocks"])
    parser.add_argument("--others", nargs="+", default=[])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    stacks = [Stack(kind, options.layers) for kind in options.kinds]
    bandwidth, found = copy_bandwidth(), []
    for rows in options.rows:
        wake()
        x = torch.randn(rows, HIDDEN, device="cuda").to(BF16)
        for stack in stacks:
            for way, run in stack.ways(options.others).items():
                name = f"{stack.kind}, {way}"
                try:
                    ms = graph_us([partial(run, x)], 1) / 1e3
                except FAILURES as error:
                    print(f"{rows:5d} {name}: {str(error)[:100]}")
                    continue
                row = Row(name, rows, ms, 1e3 * stack.nbytes / bandwidth)
                found.append(row)
                print(
                    f"{rows:5d} {row.ms:8.3f} ms {row.ms / row.floor_ms:6.3f} of the floor  {name}",
                    flush=True,
                )
    if options.json:
        report = {"environment": describe(), "options": vars(options), "rows": [asdict(row) for row in found]}
        options.json.write_text(json.dumps(report, indent=2, default=str) + "\n")


if __name__ == "__main__":
    main()
