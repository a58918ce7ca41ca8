"""The two blocks of a decoder layer: a mixer joins the tokens of a request, a feed-forward sees one at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

from torch import Tensor, nn

from common.engine.attention.backend import AttentionBackend
from common.engine.layers.activations import Activations, Reads
from common.engine.layers.norm import RmsNorm
from common.engine.layers.piece import Piece


class Mixer(nn.Module, ABC):
    """Its constructor takes (name, config, layer, weights).

    `name` stands before the layer's tensors in the checkpoint; `layer` is the index of what it keeps for requests.
    """

    reads: Reads  # of the norm before it

    @abstractmethod
    def add_norm(
        self,
        x: Activations,
        stream: Tensor,
        norm: RmsNorm,
        angles: tuple[Tensor, Tensor],
        attention: AttentionBackend,
    ) -> tuple[Activations, Tensor]:
        """Return (norm(y + stream), y + stream) of the block's output y; all [T, H].

        Args:
            x: the normed stream.
            angles: (cos, sin) of `layers/rotary`.
        """

    @abstractmethod
    def pieces(self) -> Iterator[Piece]:
        """What it reads of the checkpoint."""


class FeedForward(nn.Module, ABC):
    """Its constructor takes (name, config, weights); `name` stands before the layer's tensors in the checkpoint."""

    reads: Reads  # of the norm before it

    @abstractmethod
    def forward(self, x: Activations) -> Tensor:
        """[T, H] -> [T, H]."""

    @abstractmethod
    def add_norm(self, x: Activations, stream: Tensor, norm: RmsNorm) -> tuple[Activations, Tensor]:
        """Return (norm(y + stream), y + stream) of the block's output y; all [T, H]."""

    @abstractmethod
    def pieces(self) -> Iterator[Piece]:
        """What it reads of the checkpoint."""
