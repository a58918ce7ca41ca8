"""Weights in the dtype of the activations: bfloat16, float16 or float32."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from common.checkpoint.experts_config import ExpertsConfig
from common.checkpoint.model_config import Activation
from common.checkpoint.weight_formats import StoredWeights
from common.engine.formats.dense_experts import DenseExperts
from common.engine.layers.activations import DENSE, Activations, Reads
from common.engine.layers.linear import Embedding, Linear, WeightFormat
from common.engine.layers.norm import RmsNorm
from common.engine.layers.parts import WeightBlock
from common.engine.layers.piece import Piece
from common.engine.layers.placement import Placement, parameter
from common.engine.ops.linear import gated_linear, linear
from common.engine.ops.linear_norm import linear_add_rms_norm


class DenseLinear(Linear):
    """A product with a weight of the activations' dtype.

    Args:
        weight: [out, in].
        bias: [out].
        blocks: where its rows come from; empty for a weight that another module loads.
    """

    reads = DENSE

    def __init__(
        self, weight: nn.Parameter, bias: nn.Parameter | None, blocks: Sequence[WeightBlock]
    ) -> None:
        super().__init__()
        self.weight = weight
        self.bias = bias
        self._blocks = tuple(blocks)

    def product(self, x: Activations) -> Tensor:
        return linear(x.tensor(), self.weight, self.bias)

    def gated(self, x: Activations, reads: Reads, activation: Activation = "silu") -> Activations:
        return Activations(gated_linear(x.tensor(), self.weight, self.bias, activation))

    def add_norm(self, x: Activations, stream: Tensor, norm: RmsNorm) -> tuple[Activations, Tensor]:
        normed, stream = linear_add_rms_norm(
            x.tensor(), self.weight, self.bias, stream, norm.weight, norm.eps
        )
        return Activations(normed), stream

    def dense(self) -> Tensor:
        return self.weight

    def pieces(self) -> Iterator[Piece]:
        start = 0
        for block in self._blocks:
            end = start + block.rows
            yield block.weight(self.weight[start:end])
            yield from block.bias(None if self.bias is None else self.bias[start:end], self.weight.device)
            start = end


class LibraryLinear(DenseLinear):
    """Uses torch's product for any number of rows: for vision towers, whose batches are large."""

    def product(self, x: Activations) -> Tensor:
        return F.linear(x.tensor(), self.weight, self.bias)


class DenseFormat(WeightFormat):
    """Makes dense products.

    Args:
        product: the class of the products.
    """

    def __init__(self, placement: Placement, product: type[DenseLinear] = DenseLinear) -> None:
        self.placement = placement
        self._product = product

    def make_linear(self, blocks: Sequence[WeightBlock], bias: bool) -> DenseLinear:
        rows = sum(block.rows for block in blocks)
        weight = parameter((rows, blocks[0].columns.size), self.placement)
        return self._product(weight, parameter((rows,), self.placement) if bias else None, blocks)

    def make_experts(self, name: str, hidden_size: int, experts: ExpertsConfig) -> DenseExperts:
        return DenseExperts(name, hidden_size, experts, self.placement)

    def make_tied(self, embedding: Embedding) -> DenseLinear:
        return self._product(embedding.weight, None, ())


def dense_format(stored: StoredWeights, placement: Placement) -> DenseFormat:
    """Make the format of a checkpoint without `quantization_config`."""
    return DenseFormat(placement)
