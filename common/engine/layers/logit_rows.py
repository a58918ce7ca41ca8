"""Logits as a model returns them: each rank of a node has computed a part of the vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor


class LogitRows:
    """Logits of R rows on a node with one device, which has computed all of them."""

    divided = False
    first = 0  # token of the first column of `share`

    def __init__(self, product: Tensor) -> None:
        """`product`: [R, tokens] as the LM head returns it, in the dtype of activations or float32."""
        self._product = product

    @property
    def share(self) -> Tensor:
        """The logits [R, tokens] float32 of this rank's tokens."""
        return self._product.to(torch.float32)

    def whole(self) -> Tensor:
        """Return the logits [R, V] float32 of all tokens. If one rank calls it, all do."""
        return self.share

    def gathered(self, own: Tensor) -> Tensor:
        """Return what every rank gives as `own` [R, n], in their order: [R, ranks, n]. If one calls it, all do."""
        return own[:, None]
