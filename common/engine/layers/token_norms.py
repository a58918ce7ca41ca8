"""The norms of a token's queries and of its keys, each over all heads together."""

from __future__ import annotations

from torch import Tensor, nn

from common.engine.layers.norm import RmsNorm
from common.engine.ops.token_norm import token_norm


class TokenNorms(nn.Module):
    """The norms of a node with one device, which has all heads."""

    def __init__(self, queries: RmsNorm, keys: RmsNorm) -> None:
        super().__init__()
        self.queries, self.keys = queries, keys

    def apply_to(self, projected: Tensor) -> None:
        """Normalise queries and keys of the merged projection [T, Q + 2 * K] in place."""
        token_norm(projected, self.queries.scale, self.keys.scale, self.queries.eps)
