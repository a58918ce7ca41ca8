"""A merged product whose parts are stored in different formats, such as one with some dense parts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from common.checkpoint.model_config import Activation
from common.engine.formats.fp8_forms import gate_in_forms, norm_in_forms
from common.engine.layers.activations import Activations, Reads
from common.engine.layers.linear import Linear
from common.engine.layers.norm import RmsNorm
from common.engine.layers.piece import Piece


class MixedFormatLinear(Linear):
    """The outputs of several products of the same inputs, concatenated."""

    def __init__(self, parts: Sequence[Linear]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        forms = {part.reads.form for part in parts} - {""}
        # With several forms every part makes its own.
        one = forms.pop() if len(forms) == 1 else ""
        self.reads = Reads(any(part.reads.dense for part in parts) or not one, one)

    def _linears(self) -> Iterator[Linear]:
        for part in self.parts:
            assert isinstance(part, Linear)
            yield part

    def product(self, x: Activations) -> Tensor:
        return torch.cat([part.product(x) for part in self._linears()], dim=-1)

    def gated(self, x: Activations, reads: Reads, activation: Activation = "silu") -> Activations:
        return gate_in_forms(self.product(x), reads, activation)

    def add_norm(self, x: Activations, stream: Tensor, norm: RmsNorm) -> tuple[Activations, Tensor]:
        return norm_in_forms(self.product(x), stream, norm)

    def dense(self) -> Tensor:
        return torch.cat([part.dense() for part in self._linears()])

    def pieces(self) -> Iterator[Piece]:
        for part in self._linears():
            yield from part.pieces()
