"""A language model that drafts for a target whose vocabulary has another length.

Families of models pad their vocabularies differently: ids that both have mean the same token in both. The draft
proposes only those, and reads token 0 in the place of an id that it does not have.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from common.engine.attention.backend import AttentionBackend
from common.engine.layers.piece import Piece
from common.engine.models.causal_lm import BodyOutput, CausalLM


class SharedVocabulary(CausalLM):
    """`model` for a target with a vocabulary of `target_vocab`."""

    def __init__(self, model: CausalLM, target_vocab: int) -> None:
        super().__init__()
        self.model = model
        self.config, self.placement = model.config, model.placement
        self.embed_tokens, self.lm_head = model.embed_tokens, model.lm_head
        self._own = model.config.vocab_size
        self._shared = min(self._own, target_vocab)

    def embed(self, ids: Tensor) -> Tensor:
        return self.model.embed(torch.where(ids < self._own, ids, 0))

    def forward(self, embeds: Tensor, positions: Tensor, attention: AttentionBackend) -> BodyOutput:
        output: BodyOutput = self.model(embeds, positions, attention)
        return output

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return logits [R, shared vocabulary] float32."""
        return self.model.compute_logits(hidden)[:, : self._shared]

    def pieces(self) -> Iterator[Piece]:
        return self.model.pieces()
