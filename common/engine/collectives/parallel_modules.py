"""Tensor-parallel modules: each wraps the module of one rank, in any weight format, and combines the ranks' results."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor

from common.checkpoint.model_config import Activation
from common.engine.collectives.group import (
    CollectiveGroup,
    all_gather,
    all_reduce,
    all_reduce_fp8_norm,
    all_reduce_norm,
)
from common.engine.formats.fp8_forms import BLOCKS, FORMS, gate_in_forms, norm_in_forms
from common.engine.layers.activations import Activations, Quantised, Reads
from common.engine.layers.expert_products import ExpertProducts
from common.engine.layers.linear import Embedding, Linear
from common.engine.layers.logit_rows import LogitRows
from common.engine.layers.norm import RmsNorm
from common.engine.layers.piece import Piece
from common.engine.layers.token_norms import TokenNorms
from common.engine.ops.token_norm import scale_tokens, token_squares
from common.engine.ops.vocabulary_rows import vocabulary_rows


class ParallelLinear(Linear):
    """A product whose outputs the ranks combine before anything else reads them. Every rank has its share of W."""

    def __init__(self, inner: Linear, group: CollectiveGroup) -> None:
        super().__init__()
        self.inner, self.reads = inner, inner.reads
        # Kept because the operations find the group by its number only while it exists.
        self._group, self.number = group, group.number

    @abstractmethod
    def combine(self, y: Tensor) -> Tensor:
        """Return the result of all ranks for this rank's y."""

    def product(self, x: Activations) -> Tensor:
        return self.combine(self.inner.product(x))

    def gated(self, x: Activations, reads: Reads, activation: Activation = "silu") -> Activations:
        return gate_in_forms(self.product(x), reads, activation)

    def add_norm(self, x: Activations, stream: Tensor, norm: RmsNorm) -> tuple[Activations, Tensor]:
        return norm_in_forms(self.product(x), stream, norm)

    def dense(self) -> Tensor:
        """Return this rank's share of W."""
        return self.inner.dense()

    def pieces(self) -> Iterator[Piece]:
        return self.inner.pieces()


class RowParallelLinear(ParallelLinear):
    """A product with divided inputs: its outputs are sums over the ranks, and one rank adds the bias."""

    def combine(self, y: Tensor) -> Tensor:
        return all_reduce(y, self.number)

    def add_norm(self, x: Activations, stream: Tensor, norm: RmsNorm) -> tuple[Activations, Tensor]:
        return summed_norm(self.inner.product(x), stream, norm, self.number)


class ColumnParallelLinear(ParallelLinear):
    """A product with divided outputs: each rank computes some, and gets those of all, in the order of the ranks.

    Args:
        columns: number of outputs of all ranks.
    """

    def __init__(self, inner: Linear, group: CollectiveGroup, columns: int) -> None:
        super().__init__(inner, group)
        self._columns = columns

    def combine(self, y: Tensor) -> Tensor:
        return all_gather(y, self.number, self._columns)

    def logit_rows(self, x: Activations) -> LogitRows:
        return DividedRows(self.inner.product(x), self._group, self._columns)


class DividedRows(LogitRows):
    """Logits that are divided by tokens: this rank has computed those of its own ones."""

    divided = True

    def __init__(self, product: Tensor, group: CollectiveGroup, vocab_size: int) -> None:
        super().__init__(product)
        self._group, self._vocab_size = group, vocab_size
        self.first = group.shard.tokens(vocab_size).start

    def whole(self) -> Tensor:
        return all_gather(self._product, self._group.number, self._vocab_size).to(torch.float32)

    def gathered(self, own: Tensor) -> Tensor:
        size = self._group.shard.size
        return all_gather(own, self._group.number, size * own.shape[1]).view(len(own), size, own.shape[1])


class ParallelExperts(ExpertProducts):
    """The experts of a layer, divided over the ranks."""

    def __init__(self, inner: ExpertProducts, group: CollectiveGroup) -> None:
        super().__init__()
        self.inner, self.reads, self.share = inner, inner.reads, inner.share
        # Kept because the operations find the group by its number only while it exists.
        self._group, self.number = group, group.number

    def parts(self, x: Activations, experts: Tensor, shares: Tensor) -> Tensor:
        """Return this rank's share of the parts; those of experts on other ranks are not defined."""
        return self.inner.parts(x, self._held(experts), shares)

    def product(self, x: Activations, experts: Tensor, shares: Tensor) -> Tensor:
        return all_reduce(self._addend(x, experts, shares), self.number)

    def add_norm(
        self, x: Activations, experts: Tensor, shares: Tensor, stream: Tensor, norm: RmsNorm
    ) -> tuple[Activations, Tensor]:
        return summed_norm(self._addend(x, experts, shares), stream, norm, self.number)

    def _addend(self, x: Activations, experts: Tensor, shares: Tensor) -> Tensor:
        return self.inner.product(x, self._held(experts), shares)

    def _held(self, experts: Tensor) -> Tensor:
        """Return indices into this rank's experts; -1 for those of other ranks."""
        if not self.share.divided:
            return experts
        held = experts - self.share.experts.start
        return held.masked_fill((held < 0) | (held >= len(self.share.experts)), -1)

    def pieces(self) -> Iterator[Piece]:
        return self.inner.pieces()


class ParallelTokenNorms(TokenNorms):
    """Norms over the heads of all ranks, which exchange sums of squares: 8 bytes per token and rank."""

    def __init__(self, own: TokenNorms, group: CollectiveGroup) -> None:
        super().__init__(own.queries, own.keys)
        self._group, self.number = group, group.number

    def apply_to(self, projected: Tensor) -> None:
        queries, keys, eps = self.queries.scale, self.keys.scale, self.queries.eps
        squares = all_reduce(token_squares(projected, len(queries), len(keys)), self.number)
        scale_tokens(projected, squares, queries, keys, eps, self._group.shard.size)


class VocabParallelEmbedding(Embedding):
    """An embedding with a divided vocabulary. It shares its weight with `inner`."""

    def __init__(self, inner: Embedding, group: CollectiveGroup) -> None:
        super().__init__(inner.name, inner.vocab_size, inner.tokens, inner.weight)
        # Kept because the operations find the group by its number only while it exists.
        self._group, self.number = group, group.number

    def forward(self, ids: Tensor) -> Tensor:
        """Return [T, H] for ids [T] int64; ids of other ranks have zeros in this rank's addend."""
        return all_reduce(vocabulary_rows(ids, self.weight, self.tokens.start), self.number)


def summed_norm(y: Tensor, stream: Tensor, norm: RmsNorm, group: int) -> tuple[Activations, Tensor]:
    """Return (norm(z + stream), z + stream), the first in the forms of `norm.reads`, for the sum z of all ranks' y."""
    form = norm.reads.form
    if norm.reads.dense or form not in FORMS:
        normed, total = all_reduce_norm(y, stream, norm.scale, norm.eps, group)
        return Activations(normed), total
    codes, scales, total = all_reduce_fp8_norm(y, stream, norm.scale, norm.eps, form == BLOCKS, group)
    return Activations(None, Quantised(form, codes, scales)), total
