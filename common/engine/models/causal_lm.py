"""The interface of a language model of any family."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor, nn

from common.checkpoint.model_config import ModelConfig
from common.engine.attention.backend import AttentionBackend
from common.engine.layers.linear import Embedding, Linear
from common.engine.layers.logit_rows import LogitRows
from common.engine.layers.piece import Piece
from common.engine.layers.placement import Placement


class BodyOutput(NamedTuple):
    """The body's output; every field is per token."""

    last: Tensor  # [T, H] after the final norm: the input of the LM head
    # [T, k * H] residual streams entering the k aux layers, concatenated; None without aux layers
    aux: Tensor | None


class CausalLM(nn.Module, ABC):
    """A model in three parts that a caller may run separately: `embed`, the body (`forward`), `compute_logits`.

    Graphs capture only the body; its mixers are the operations that depend on requests. The per-request state of the
    model follows from its config (`common/kv_cache/layer_kinds.py`), so memory is planned before the model is built.

    The constructor takes (config, placement, aux_layers). aux_layers are the boundaries whose residual streams are in
    `BodyOutput.aux`: 0 .. num_layers, ascending; i is the input of layer i, num_layers that of the final norm.
    Parameters are uninitialised until `weights.load_weights` has filled `pieces()`.
    """

    config: ModelConfig
    placement: Placement
    embed_tokens: Embedding  # shared with draft models
    lm_head: Linear  # shared with draft models

    def embed(self, ids: Tensor) -> Tensor:
        """Return [T, H] for ids [T] int64."""
        embeds: Tensor = self.embed_tokens(ids)
        return embeds

    @abstractmethod
    def forward(self, embeds: Tensor, positions: Tensor, attention: AttentionBackend) -> BodyOutput:
        """Run the body on embeds [T, H], with positions as in ForwardBatch. `attention` has planned the batch."""

    @abstractmethod
    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return logits [R, V] float32 for rows of `BodyOutput.last` [R, H]."""

    def logit_rows(self, hidden: Tensor) -> LogitRows:
        """Return the same as `compute_logits`, but leave the parts of the ranks where they are."""
        return LogitRows(self.compute_logits(hidden))

    @abstractmethod
    def pieces(self) -> Iterator[Piece]:
        """Yield the checkpoint pieces that it reads: each value of the model exactly once."""
