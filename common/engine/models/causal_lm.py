"""What the rest of the engine knows of a language model, of whichever family it is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor, nn

from common.checkpoint.model_config import ModelConfig
from common.engine.attention.backend import AttentionBackend
from common.engine.layers.linear import Embedding, Linear
from common.engine.layers.piece import Piece
from common.engine.layers.placement import Placement


class BodyOutput(NamedTuple):
    """What the body returns; every field is per token."""

    last: Tensor  # [T, H] after the final norm: what the LM head takes
    # [T, k * H] residual streams entering the k aux layers, side by side; None without any
    aux: Tensor | None


class CausalLM(nn.Module, ABC):
    """Three parts that a caller may run apart: `embed`, the body (`forward`), `compute_logits`.

    Graphs capture the body only; its mixers are the operations that know requests. What the model keeps for requests
    follows from its config (`common/kv_cache/layer_kinds.py`), so that memory is planned before it is built.

    Its constructor takes (config, placement, aux_layers), aux_layers being the boundaries whose residual streams
    `BodyOutput.aux` has: 0 .. num_layers, ascending; i enters layer i, num_layers the final norm. Parameters are
    uninitialised until `weights.load_weights` has filled `pieces()`.
    """

    config: ModelConfig
    placement: Placement
    embed_tokens: Embedding  # drafts share it
    lm_head: Linear  # the same

    def embed(self, ids: Tensor) -> Tensor:
        """[T] int64 -> [T, H]."""
        embeds: Tensor = self.embed_tokens(ids)
        return embeds

    @abstractmethod
    def forward(self, embeds: Tensor, positions: Tensor, attention: AttentionBackend) -> BodyOutput:
        """Run the body: embeds [T, H], positions as in ForwardBatch. `attention` has planned the batch."""

    @abstractmethod
    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Rows of `BodyOutput.last` [R, H] -> [R, V] float32."""

    @abstractmethod
    def pieces(self) -> Iterator[Piece]:
        """What it reads of its checkpoint: each of our values exactly once."""
