"""The interface of a matrix product in any weight format, and the token embedding."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from common.checkpoint.experts_config import ExpertsConfig
from common.checkpoint.model_config import Activation
from common.engine.layers.activations import Activations, Reads
from common.engine.layers.expert_products import ExpertProducts
from common.engine.layers.logit_rows import LogitRows
from common.engine.layers.norm import RmsNorm
from common.engine.layers.parts import (
    Columns,
    Features,
    Parts,
    WeightBlock,
    declared_runs,
    head_group,
    input_columns,
    rank_blocks,
)
from common.engine.layers.piece import Piece
from common.engine.layers.placement import Placement, parameter
from common.errors import ModelError


class Linear(nn.Module, ABC):
    """y = x W^T + b. The only owner of its weight: no other code depends on how it is stored.

    The rows of W may come from several tensors of the checkpoint, such as queries, keys and values, or gate and up
    projections. Each method is one registered operation, so graphs and traces contain one call, whichever kernels it
    chooses.
    """

    reads: Reads

    @abstractmethod
    def product(self, x: Activations) -> Tensor:
        """Return [..., out] for x [..., in], with the parts concatenated.

        Its last kernel on a GPU lets the next one be launched only after all kernels before it have ended, since
        `ops/rotary_decode` reads older keys before it waits for the product.
        """

    def logit_rows(self, x: Activations) -> LogitRows:
        """Return the product of x [R, in] as an LM head; the ranks may each have a part of its columns."""
        return LogitRows(self.product(x))

    @abstractmethod
    def gated(self, x: Activations, reads: Reads, activation: Activation = "silu") -> Activations:
        """Return activation(gate) * up [..., out / 2] for x [..., in]; the first half of the rows of W are gates.

        Args:
            reads: the forms that the next product takes.
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
    """Token embedding, whose weight may also serve as the LM head.

    Args:
        tokens: those of the vocabulary that this rank holds.
        weight: [tokens, H].
    """

    def __init__(self, name: str, vocab_size: int, tokens: range, weight: nn.Parameter) -> None:
        super().__init__()
        self.name, self.vocab_size, self.tokens, self.weight = name, vocab_size, tokens, weight

    def forward(self, ids: Tensor) -> Tensor:
        """Return [T, H] for ids [T] int64."""
        return F.embedding(ids, self.weight)

    def pieces(self) -> Iterator[Piece]:
        yield Piece.rows_of(f"{self.name}.weight", self.weight, self.tokens.start, self.vocab_size)


class WeightFormat(ABC):
    """Makes the products of one model in the format in which its checkpoint stores their weights.

    Layers declare whole products. This class finds the share of this rank and how the ranks combine their results;
    formats make products from blocks.
    """

    placement: Placement  # for activations, norms and embeddings

    @abstractmethod
    def make_linear(self, blocks: Sequence[WeightBlock], bias: bool) -> Linear:
        """Make an uninitialised product whose rows are `blocks`, all of the same columns."""

    @abstractmethod
    def make_tied(self, embedding: Embedding) -> Linear:
        """Make a product that uses the embedding's weight."""

    def make_experts(self, name: str, hidden_size: int, experts: ExpertsConfig) -> ExpertProducts:
        """Make this rank's share of the uninitialised experts of a layer. Raises ModelError if the format has none."""
        raise ModelError(
            f"{name}: experts are not supported in this weight format; use a checkpoint without it"
        )

    def linear(self, inputs: Features, parts: Parts, bias: bool) -> Linear:
        """Make an uninitialised product.

        Args:
            inputs: the values that it reads. If they are divided by heads, its outputs are summed over the ranks.
            parts: where the rows of its weight come from; names are without `.weight`. Heads are divided.
        """
        shard = self.placement.shard
        columns = input_columns(inputs, shard, next(declared_runs(parts)).name)
        blocks = rank_blocks(parts, columns, shard)
        if bias and columns.divided and shard.rank:  # rank 0 adds the bias of a sum
            blocks, bias = tuple(block._replace(bias_elsewhere=True) for block in blocks), False
        made = self.make_linear(blocks, bias)
        return made if head_group(inputs).heads == 1 else self.placement.ranks.summed(made)

    def embedding(self, name: str, vocab_size: int, hidden_size: int) -> Embedding:
        """Make an uninitialised embedding, divided by vocabulary."""
        tokens = self.placement.shard.tokens(vocab_size)
        weight = parameter((len(tokens), hidden_size), self.placement)
        return self.placement.ranks.summed(Embedding(name, vocab_size, tokens, weight))

    def head(self, name: str, hidden_size: int, vocab_size: int) -> Linear:
        """Make an uninitialised LM head, divided by vocabulary. `name` is without `.weight`."""
        tokens = self.placement.shard.tokens(vocab_size)
        block = WeightBlock(name, len(tokens), tokens.start, vocab_size, Columns(hidden_size, 0, hidden_size))
        return self.placement.ranks.gathered(self.make_linear([block], bias=False), vocab_size)

    def tied_head(self, embedding: Embedding) -> Linear:
        """Make an LM head that uses the embedding's weight."""
        return self.placement.ranks.gathered(self.make_tied(embedding), embedding.vocab_size)

    def experts(self, name: str, hidden_size: int, experts: ExpertsConfig) -> ExpertProducts:
        """Make the uninitialised experts of a layer, whose tensors have the prefix `name` in the checkpoint.

        Raises ModelError if the format has none.
        """
        return self.placement.ranks.summed(self.make_experts(name, hidden_size, experts))


def logits(hidden: Tensor, head: Linear) -> Tensor:
    """Return the logits [R, V] float32 of hidden [R, H]."""
    return head.logit_rows(Activations(hidden)).whole()
