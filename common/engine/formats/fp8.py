"""Weights in FP8 (e4m3) with scales, as checkpoints store them or as they are quantised while they are loaded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor, nn

from common.checkpoint.experts_config import ExpertsConfig
from common.checkpoint.fp8_weights import BLOCK, BLOCK_SIZE, CHANNEL, TENSOR, Fp8Scheme, Fp8Weights
from common.checkpoint.model_config import Activation
from common.checkpoint.weight_formats import StoredWeights
from common.engine.formats.dense import DenseFormat
from common.engine.formats.fp8_experts import Fp8Experts
from common.engine.formats.fp8_forms import BLOCKS, FORMS, ROWS, gate_in_forms
from common.engine.formats.fp8_pieces import (
    block_scales,
    blocks_in,
    input_scale,
    quantising,
    scales_of,
    tensor_scale,
)
from common.engine.formats.mixed_format import MixedFormatLinear
from common.engine.layers.activations import DENSE, Activations, Quantised, Reads
from common.engine.layers.expert_products import ExpertProducts
from common.engine.layers.linear import Embedding, Linear, WeightFormat
from common.engine.layers.norm import RmsNorm
from common.engine.layers.parts import WeightBlock
from common.engine.layers.piece import Piece
from common.engine.layers.placement import Placement, parameter
from common.engine.ops.fp8_gated import fp8_gated
from common.engine.ops.fp8_linear import FP8, fp8_product, quantize_rows, quantize_with, values_of
from common.engine.ops.fp8_linear_norm import fp8_product_norm, fp8_product_norm_quantized
from common.errors import ModelError


class Fp8Linear(Linear):
    """A product with a weight in FP8.

    Scales per tensor are kept as scales per row, so that the parts of a merged weight keep theirs exactly.

    Args:
        blocks: where its rows come from; the parts of a block-wise weight begin where blocks begin.
        online: the checkpoint's weight is dense, and quantised with one scale per row while it is loaded.
    """

    def __init__(
        self,
        blocks: Sequence[WeightBlock],
        bias: bool,
        scheme: Fp8Scheme,
        online: bool,
        placement: Placement,
    ) -> None:
        super().__init__()
        rows, columns = sum(block.rows for block in blocks), blocks[0].columns.size
        wide = replace(placement, dtype=torch.float32)
        self._blocks, self._scheme, self._online = tuple(blocks), scheme, online
        self._dtype = placement.dtype
        self.codes = parameter((rows, columns), replace(placement, dtype=FP8))
        by_blocks = scheme.weights == BLOCK
        self.scales = parameter((blocks_in(rows), blocks_in(columns)) if by_blocks else (rows,), wide)
        self.bias = parameter((rows,), placement) if bias else None
        # One scale for all parts of a merged weight, which read the same values: the largest of theirs.
        self.input_scale: nn.Parameter | None = None
        self._form = BLOCKS if by_blocks else ROWS
        self.reads = Reads(dense=False, form=self._form)
        if scheme.static:
            self.input_scale = parameter((), wide)
            self.reads = DENSE
            with torch.no_grad():
                self.input_scale.zero_()

    def product(self, x: Activations) -> Tensor:
        return fp8_product(*self._operands(x), self._dtype)

    def gated(self, x: Activations, reads: Reads, activation: Activation = "silu") -> Activations:
        if reads.dense or reads.form != self._form:
            return gate_in_forms(self.product(x), reads, activation)
        codes, scales = fp8_gated(*self._operands(x), activation, self._dtype)
        return Activations(None, Quantised(self._form, codes, scales))

    def add_norm(self, x: Activations, stream: Tensor, norm: RmsNorm) -> tuple[Activations, Tensor]:
        given = *self._operands(x), stream, norm.weight, norm.eps
        form = norm.reads.form
        if norm.reads.dense or form not in FORMS:
            normed, total = fp8_product_norm(*given)
            return Activations(normed), total
        codes, scales, total = fp8_product_norm_quantized(*given, form == BLOCKS)
        return Activations(None, Quantised(form, codes, scales)), total

    def _operands(self, x: Activations) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        """Return what the products take: quantised rows and weight, each with its scales, and the bias."""
        if x.quantised is not None and x.quantised.form == self.reads.form:
            codes, scales = x.quantised.codes, x.quantised.scales
        elif self.input_scale is not None:
            codes, scales = quantize_with(x.tensor(), self.input_scale)
        else:
            codes, scales = quantize_rows(x.tensor(), self._form == BLOCKS)
        return codes, scales, self.codes, self.scales, self.bias

    def dense(self) -> Tensor:
        return values_of(self.codes, self.scales).to(self._dtype)

    def pieces(self) -> Iterator[Piece]:
        start = 0
        for block in self._blocks:
            end = start + block.rows
            yield from self._weight_pieces(block, start, end)
            yield from block.bias(None if self.bias is None else self.bias[start:end], self.scales.device)
            if self.input_scale is not None:
                yield input_scale(f"{block.name}.input_scale", self.input_scale)
            start = end

    def _weight_pieces(self, block: WeightBlock, start: int, end: int) -> Iterator[Piece]:
        codes = block.weight(self.codes[start:end])
        if self._online:
            yield quantising(codes, self.scales[start:end], range(block.columns.whole))
            return
        yield codes
        name = f"{block.name}.{self._scheme.scale}"
        if self._scheme.weights == TENSOR:
            yield tensor_scale(name, self.scales[start:end])
        elif self._scheme.weights == CHANNEL:
            yield scales_of(block.per_row(self._scheme.scale, self.scales[start:end, None]))
        else:
            scales = self.scales[start // BLOCK_SIZE : blocks_in(end)]
            yield block_scales(name, scales, codes)


class Fp8Format(WeightFormat):
    """Makes the products of a checkpoint; those that it ignores, the LM head and embeddings are dense."""

    def __init__(self, stored: StoredWeights, placement: Placement) -> None:
        assert isinstance(stored, Fp8Weights)
        self.placement = placement
        self._stored = stored
        self._dense = DenseFormat(placement)

    def make_linear(self, blocks: Sequence[WeightBlock], bias: bool) -> Linear:
        parts = [self._make_part(part, bias) for part in self._parts(blocks)]
        return parts[0] if len(parts) == 1 else MixedFormatLinear(parts)

    def _make_part(self, blocks: Sequence[WeightBlock], bias: bool) -> Linear:
        scheme = self._stored.scheme_of(blocks[0].name)
        if scheme is None:
            return self._dense.make_linear(blocks, bias)
        return Fp8Linear(blocks, bias, scheme, self._stored.online, self.placement)

    def _parts(self, blocks: Sequence[WeightBlock]) -> Iterator[Sequence[WeightBlock]]:
        """Divide a merged weight where its scheme changes, and where a part ends inside a block of scales."""
        schemes = [self._stored.scheme_of(block.name) for block in blocks]
        cuts, rows = [0], 0
        for index in range(1, len(blocks)):
            rows += blocks[index - 1].rows
            scheme = schemes[index]
            by_blocks = scheme is not None and scheme.weights == BLOCK
            if schemes[index - 1] != scheme or (by_blocks and rows % BLOCK_SIZE):
                cuts.append(index)
                rows = 0
        for begin, end in pairwise((*cuts, len(blocks))):
            yield blocks[begin:end]

    def make_experts(self, name: str, hidden_size: int, experts: ExpertsConfig) -> ExpertProducts:
        names = experts.names
        block = f"{name}.{names.block}"
        of_experts = [
            self._stored.scheme_of(f"{block}.experts.0.{each}") for each in (names.gate, names.up, names.down)
        ]
        stem = f"{block}.{names.shared}"
        shared = [
            self._stored.scheme_of(f"{stem}.{each}_proj") for each in ("gate", "up", "down") if experts.shared
        ]
        scheme = of_experts[0]
        if any(each != scheme for each in (*of_experts, *shared)):
            raise ModelError(
                f"{block}: the projections of experts and shared experts are quantised in different ways, which is not "
                "supported; use a checkpoint that quantises all of them alike, or none"
            )
        if scheme is None:
            return self._dense.make_experts(name, hidden_size, experts)
        return Fp8Experts(name, hidden_size, experts, scheme, self._stored.online, self.placement)

    def head(self, name: str, hidden_size: int, vocab_size: int) -> Linear:
        return self._dense.head(name, hidden_size, vocab_size)

    def make_tied(self, embedding: Embedding) -> Linear:
        return self._dense.make_tied(embedding)
