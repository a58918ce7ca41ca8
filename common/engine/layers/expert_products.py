"""The interface of the products of a layer's experts, in any weight format."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

from torch import Tensor, nn

from common.engine.attention.backend import TokenSlots
from common.engine.layers.activations import Activations, Reads
from common.engine.layers.norm import RmsNorm
from common.engine.layers.piece import Piece
from common.engine.layers.ranks import ExpertShare
from common.engine.layers.router import ExpertRouter
from common.engine.ops.sum_parts import sum_parts


class ExpertProducts(nn.Module, ABC):
    """down(silu(gate(x)) * up(x)) of the experts of one layer. The only owner of their weights, as `Linear` is of its.

    Experts 0 .. E-1 are those that the router chooses from; the shared experts follow.
    """

    reads: Reads
    share: ExpertShare  # what this rank computes

    @abstractmethod
    def parts(self, x: Activations, experts: Tensor, shares: Tensor) -> Tensor:
        """Return share * output [T, K, H] of the chosen experts of each token, rounded to the dtype of x.

        Args:
            x: [T, H].
            experts: [T, K] int32, indices into `share.experts`, negative: none; a token has no expert twice.
            shares: [T, K] float32.
        """

    def product(self, x: Activations, experts: Tensor, shares: Tensor) -> Tensor:
        """Return the sum of `parts` over the experts of each token [T, H]; zeros for tokens without experts."""
        return sum_parts(self.parts(x, experts, shares), experts)

    def add_norm(
        self, x: Activations, experts: Tensor, shares: Tensor, stream: Tensor, norm: RmsNorm
    ) -> tuple[Activations, Tensor]:
        """Return (norm(y + stream), y + stream), where y is `product`."""
        normed, total = norm.add_parts(self.parts(x, experts, shares), experts, stream)
        return Activations(normed), total

    def added(
        self, x: Activations, stream: Tensor, router: ExpertRouter, slots: TokenSlots | None
    ) -> Tensor | None:
        """Return stream + `product` of the experts that `router` chooses for x [T, H].

        None: the format has no kernels that contain the choice and the addition, or separate ones are faster.
        """
        return None

    @abstractmethod
    def pieces(self) -> Iterator[Piece]:
        """Yield the checkpoint pieces that it reads: each of its values exactly once."""
