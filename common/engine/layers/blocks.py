"""The two blocks of a decoder layer: a mixer combines tokens of a request, a feed-forward handles single tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

from torch import Tensor, nn

from common.engine.attention.backend import AttentionBackend, TokenSlots
from common.engine.layers.activations import Activations, Reads
from common.engine.layers.norm import RmsNorm
from common.engine.layers.piece import Piece


class Mixer(nn.Module, ABC):
    """A block that combines tokens. Its constructor takes (name, config, layer, weights).

    `name` is the prefix of the layer's tensors in the checkpoint; `layer` is the index of its per-request state.
    """

    reads: Reads  # the forms that the preceding norm has to output

    @abstractmethod
    def forward(self, x: Activations, angles: tuple[Tensor, Tensor], attention: AttentionBackend) -> Tensor:
        """Return its output [T, H]. Arguments as in `add_norm`."""

    @abstractmethod
    def add_norm(
        self,
        x: Activations,
        stream: Tensor,
        norm: RmsNorm,
        angles: tuple[Tensor, Tensor],
        attention: AttentionBackend,
    ) -> tuple[Activations, Tensor]:
        """Return (norm(y + stream), y + stream), where y is the block's output; all [T, H].

        Args:
            x: the normed stream.
            angles: (cos, sin) from `layers/rotary`.
        """

    @abstractmethod
    def pieces(self) -> Iterator[Piece]:
        """Yield the checkpoint pieces that it reads."""


class FeedForward(nn.Module, ABC):
    """A block that handles tokens independently. Its constructor takes (name, config, weights).

    `name` is the prefix of the layer's tensors in the checkpoint.
    """

    reads: Reads  # the forms that the preceding norm has to output

    @abstractmethod
    def forward(self, x: Activations) -> Tensor:
        """Return [T, H] for x [T, H]."""

    @abstractmethod
    def add_norm(
        self, x: Activations, stream: Tensor, norm: RmsNorm, slots: TokenSlots | None = None
    ) -> tuple[Activations, Tensor]:
        """Return (norm(y + stream), y + stream), where y is the block's output; all [T, H].

        Args:
            slots: says which rows are padding, whose output is of no use; None: it is not known.
        """

    @abstractmethod
    def pieces(self) -> Iterator[Piece]:
        """Yield the checkpoint pieces that it reads."""
