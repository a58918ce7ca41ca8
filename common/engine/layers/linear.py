"""What layers ask of a matrix product, whatever format its weight has; and the token embedding."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.engine.layers.activations import Activations, Reads
from common.engine.layers.norm import RmsNorm
from common.engine.layers.piece import Piece
from common.engine.layers.placement import Placement, parameter


class Linear(nn.Module, ABC):
    """y = x W^T + b. The only owner of its weight: nobody else knows how it is stored.

    The rows of W may come from several tensors of the checkpoint, as queries, keys and values do, or gates and what
    they are multiplied with. Each method is one registered operation, so that graphs and traces hold one call whatever
    kernels it chooses.
    """

    reads: Reads

    @abstractmethod
    def product(self, x: Activations) -> Tensor:
        """[..., in] -> [..., out], the parts one after another."""

    @abstractmethod
    def gated(self, x: Activations, reads: Reads) -> Activations:
        """[..., in] -> silu(gate) * up [..., out / 2], where the first half of the rows of W are gates.

        Args:
            reads: what the next product takes.
        """

    @abstractmethod
    def add_norm(self, x: Activations, stream: Tensor, norm: RmsNorm) -> tuple[Activations, Tensor]:
        """Return (norm(y + stream), y + stream), the first in the forms of `norm.reads`."""

    @abstractmethod
    def dense(self) -> Tensor:
        """Return W [out, in] in the dtype of activations. For load time and references: it may compute and copy."""

    @abstractmethod
    def pieces(self) -> Iterator[Piece]:
        """What it reads of the checkpoint: each of its values exactly once."""


class Embedding(nn.Module):
    """Token embedding, whose weight may serve as the LM head too."""

    def __init__(self, name: str, vocab_size: int, hidden_size: int, placement: Placement) -> None:
        super().__init__()
        self.name = name
        self.weight = parameter((vocab_size, hidden_size), placement)  # [V, H]

    def forward(self, ids: Tensor) -> Tensor:
        """[T] int64 -> [T, H]."""
        return F.embedding(ids, self.weight)

    def pieces(self) -> Iterator[Piece]:
        yield Piece.all_of(f"{self.name}.weight", self.weight)


class WeightFormat(ABC):
    """Makes the products of one model, as its checkpoint stores their weights."""

    placement: Placement  # of activations, norms and embeddings

    @abstractmethod
    def linear(self, in_features: int, parts: Mapping[str, int], bias: bool) -> Linear:
        """Make an uninitialised product.

        Args:
            parts: name in the checkpoint, without `.weight` -> rows.
        """

    @abstractmethod
    def tied_head(self, embedding: Embedding) -> Linear:
        """Make an LM head of the embedding's own weight."""


def logits(hidden: Tensor, head: Linear) -> Tensor:
    """hidden [R, H] -> [R, V] float32."""
    return head.product(Activations(hidden)).to(torch.float32)
