"""A second weight format, added by its record: 8-bit integers with one scale per row, for weights and activations.

Its checkpoints have `NAME.weight` as I8 [out, in] and `NAME.weight_scale` as F32 [out, 1]. Sums of products of such
integers are exact in float32 up to a depth of 1,040, in any order of addition.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from common.checkpoint.model_config import Activation
from common.checkpoint.weight_formats import StoredWeights
from common.engine.formats.dense import DenseFormat
from common.engine.layers.activations import Activations, Quantised, Reads
from common.engine.layers.linear import Embedding, Linear, WeightFormat
from common.engine.layers.norm import RmsNorm
from common.engine.layers.parts import WeightBlock
from common.engine.layers.piece import Piece
from common.engine.layers.placement import Placement
from common.engine.ops.rms_norm import add_rms_norm
from tests.fakes.int8_record import METHOD, Int8Weights

FORM = METHOD
HIGHEST = 127.0


def quantise(values: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize [..., n] to (int8 codes [..., n], float32 scales [..., 1])."""
    scales = values.float().abs().amax(-1, keepdim=True).clamp(min=1e-12) / HIGHEST
    return (values.float() / scales).round().to(torch.int8), scales


def in_forms(values: Tensor, reads: Reads) -> Activations:
    """Quantize activations into the forms that a reader needs, and no others."""
    quantised = Quantised(FORM, *quantise(values)) if reads.form == FORM else None
    return Activations(values if reads.dense or quantised is None else None, quantised)


class Int8Linear(Linear):
    reads = Reads(dense=False, form=FORM)

    def __init__(self, blocks: Sequence[WeightBlock], bias: bool, placement: Placement) -> None:
        super().__init__()
        self._blocks, self._dtype = tuple(blocks), placement.dtype
        rows, device = sum(block.rows for block in self._blocks), placement.device
        codes = torch.empty(rows, blocks[0].columns.size, dtype=torch.int8, device=device)
        self.codes = nn.Parameter(codes, requires_grad=False)
        self.scales = nn.Parameter(torch.empty(rows, 1, device=device), requires_grad=False)
        bias_values = torch.empty(rows, dtype=placement.dtype, device=device)
        self.bias = nn.Parameter(bias_values, requires_grad=False) if bias else None

    def product(self, x: Activations) -> Tensor:
        if x.quantised is not None and x.quantised.form == FORM:
            codes, scales = x.quantised.codes, x.quantised.scales
        else:
            codes, scales = quantise(x.tensor())
        out = (codes.float() @ self.codes.float().T * scales * self.scales.T).to(self._dtype)
        return out if self.bias is None else out + self.bias

    def gated(self, x: Activations, reads: Reads, activation: Activation = "silu") -> Activations:
        gate, up = self.product(x).chunk(2, dim=-1)
        activated = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
        return in_forms(activated * up, reads)

    def add_norm(self, x: Activations, stream: Tensor, norm: RmsNorm) -> tuple[Activations, Tensor]:
        normed, total = add_rms_norm(self.product(x), stream, norm.weight, norm.eps)
        return in_forms(normed, norm.reads), total

    def dense(self) -> Tensor:
        return (self.codes.float() * self.scales).to(self._dtype)

    def pieces(self) -> Iterator[Piece]:
        start = 0
        for block in self._blocks:
            end = start + block.rows
            yield block.weight(self.codes[start:end])
            yield block.per_row("weight_scale", self.scales[start:end])
            yield from block.bias(None if self.bias is None else self.bias[start:end], self.scales.device)
            start = end


class Int8Format(WeightFormat):
    def __init__(self, stored: StoredWeights, placement: Placement) -> None:
        assert isinstance(stored, Int8Weights)
        self.placement = placement
        self._ignored = stored.ignored
        self._dense = DenseFormat(placement)

    def make_linear(self, blocks: Sequence[WeightBlock], bias: bool) -> Linear:
        if all(block.name in self._ignored for block in blocks):
            return self._dense.make_linear(blocks, bias)
        return Int8Linear(blocks, bias, self.placement)

    def make_tied(self, embedding: Embedding) -> Linear:
        return self._dense.make_tied(embedding)


def write_checkpoint(source: Path, target: Path, ignored: tuple[str, ...]) -> None:
    """Quantize the dense model of `source`, except its embedding and the `ignored` products."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors", "*.index.json"))
    tensors: dict[str, Tensor] = {}
    for file in sorted(source.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            product = name.removesuffix(".weight")
            if tensor.ndim != 2 or "embed_tokens" in name or product in ignored:
                tensors[name] = tensor
            else:
                tensors[name], tensors[f"{name}_scale"] = quantise(tensor)
    save_file(tensors, target / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": METHOD,
        "activation_bits": 8,
        "ignore": list(ignored),
    }
    (target / "config.json").write_text(json.dumps(config))
