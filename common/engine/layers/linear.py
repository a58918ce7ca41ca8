"""The interface of a matrix product in any weight format, and the token embedding."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.checkpoint.experts_config import ExpertsConfig
from common.engine.layers.activations import Activations, Reads
from common.engine.layers.expert_products import ExpertProducts
from common.engine.layers.norm import RmsNorm
from common.engine.layers.piece import Piece
from common.engine.layers.placement import Placement, parameter
from common.errors import ModelError


class RowBlock(NamedTuple):
    """Consecutive rows of a tensor in the checkpoint that become consecutive rows of a product's weight."""

    name: str  # without `.weight`
    rows: int
    begin: int  # index of the first row in the tensor
    whole: int  # number of rows of the tensor

    def piece(self, suffix: str, into: Tensor) -> Piece:
        """Return the read of these rows of `NAME.suffix`; `into` has `rows` rows."""
        return Piece.rows_of(f"{self.name}.{suffix}", into, self.begin, self.whole)


# The rows of a product's weight, in order: whole tensors with their number of rows, or blocks of tensors.
Parts: TypeAlias = Mapping[str, int] | Sequence[RowBlock]


def row_blocks(parts: Parts) -> tuple[RowBlock, ...]:
    """Return the rows of a product's weight as blocks of tensors."""
    if isinstance(parts, Mapping):
        return tuple(RowBlock(name, rows, 0, rows) for name, rows in parts.items())
    return tuple(parts)


class Linear(nn.Module, ABC):
    """y = x W^T + b. The only owner of its weight: no other code depends on how it is stored.

    The rows of W may come from several tensors of the checkpoint, such as queries, keys and values, or gate and up
    projections. Each method is one registered operation, so graphs and traces contain one call, whichever kernels it
    chooses.
    """

    reads: Reads

    @abstractmethod
    def product(self, x: Activations) -> Tensor:
        """Return [..., out] for x [..., in], with the parts concatenated."""

    @abstractmethod
    def gated(self, x: Activations, reads: Reads, gelu: bool = False) -> Activations:
        """Return silu(gate) * up [..., out / 2] for x [..., in]; the first half of the rows of W are gates.

        Args:
            reads: the forms that the next product takes.
            gelu: the tanh form of gelu instead of silu.
        """

    @abstractmethod
    def add_norm(self, x: Activations, stream: Tensor, norm: RmsNorm) -> tuple[Activations, Tensor]:
        """Return (norm(y + stream), y + stream), the first in the forms of `norm.reads`."""

    @abstractmethod
    def dense(self) -> Tensor:
        """Return W [out, in] in the dtype of activations.

        For load time and references only: it may compute and copy.
        """

    @abstractmethod
    def pieces(self) -> Iterator[Piece]:
        """Yield the checkpoint pieces that it reads: each of its values exactly once."""


class Embedding(nn.Module):
    """Token embedding, whose weight may also serve as the LM head."""

    def __init__(self, name: str, vocab_size: int, hidden_size: int, placement: Placement) -> None:
        super().__init__()
        self.name = name
        self.weight = parameter((vocab_size, hidden_size), placement)  # [V, H]

    def forward(self, ids: Tensor) -> Tensor:
        """Return [T, H] for ids [T] int64."""
        return F.embedding(ids, self.weight)

    def pieces(self) -> Iterator[Piece]:
        yield Piece.all_of(f"{self.name}.weight", self.weight)


class WeightFormat(ABC):
    """Makes the products of one model in the format in which its checkpoint stores their weights."""

    placement: Placement  # of activations, norms and embeddings

    @abstractmethod
    def linear(self, in_features: int, parts: Parts, bias: bool) -> Linear:
        """Make an uninitialised product.

        Args:
            parts: where the rows of its weight come from; names are without `.weight`.
        """

    @abstractmethod
    def tied_head(self, embedding: Embedding) -> Linear:
        """Make an LM head that uses the embedding's weight."""

    def experts(self, name: str, hidden_size: int, experts: ExpertsConfig) -> ExpertProducts:
        """Make the uninitialised experts of a layer, whose tensors have the prefix `name` in the checkpoint.

        Raises ModelError if the format has none.
        """
        raise ModelError(
            f"{name}: experts are not supported in this weight format; use a checkpoint without it"
        )


def logits(hidden: Tensor, head: Linear) -> Tensor:
    """Return the logits [R, V] float32 of hidden [R, H]."""
    return head.product(Activations(hidden)).to(torch.float32)
