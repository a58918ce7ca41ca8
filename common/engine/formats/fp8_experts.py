"""Experts with weights in FP8, stacked: one tensor of codes for gate and up, one for down, and their scales."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from common.checkpoint.experts_config import ExpertsConfig
from common.checkpoint.fp8_weights import BLOCK, CHANNEL, TENSOR, Fp8Scheme
from common.engine.formats.fp8_pieces import (
    ExpertInputScale,
    block_scales,
    blocks_in,
    quantising,
    scales_of,
    tensor_scale,
)
from common.engine.layers.activations import DENSE, Activations
from common.engine.layers.expert_products import ExpertProducts
from common.engine.layers.piece import Piece
from common.engine.layers.placement import Placement, parameter
from common.engine.ops.fp8_codes import FP8
from common.engine.ops.fp8_experts import fp8_expert_parts

GATES, DOWNS = 0, 1


class Fp8Experts(ExpertProducts):
    """The stacks, filled from a matrix per expert, or online from dense stacks as well.

    Args:
        online: the checkpoint's weights are dense, and quantised with one scale per row while they are loaded.
    """

    reads = DENSE

    def __init__(
        self,
        name: str,
        hidden_size: int,
        experts: ExpertsConfig,
        scheme: Fp8Scheme,
        online: bool,
        placement: Placement,
    ) -> None:
        super().__init__()
        self._block, self._experts = f"{name}.{experts.names.block}", experts
        self._scheme, self._online = scheme, online
        total = experts.count + experts.shared
        self.share = placement.ranks.expert_share(total, experts.inner, self._block)
        count, inner = len(self.share.experts), len(self.share.inner)
        codes, wide = replace(placement, dtype=FP8), replace(placement, dtype=torch.float32)
        self.gate_up = parameter((count, 2 * inner, hidden_size), codes)  # [E, 2 I, H], gates first
        self.down = parameter((count, hidden_size, inner), codes)  # [E, H, I]
        if scheme.weights == BLOCK:
            within, across = blocks_in(inner), blocks_in(hidden_size)
            gates: tuple[int, ...] = (count, 2, within, across)
            downs: tuple[int, ...] = (count, across, within)
        else:
            gates, downs = (count, 2 * inner), (count, hidden_size)
        self.gate_up_scales, self.down_scales = parameter(gates, wide), parameter(downs, wide)
        # The inputs of all experts have one scale, the largest of theirs, and so have their inner values.
        self.input_scales: nn.Parameter | None = None
        if scheme.static:
            self.input_scales = parameter((2,), wide)
            with torch.no_grad():
                self.input_scales.zero_()

    def parts(self, x: Activations, experts: Tensor, shares: Tensor) -> Tensor:
        return fp8_expert_parts(
            x.tensor(),
            self.gate_up,
            self.gate_up_scales,
            self.down,
            self.down_scales,
            self.input_scales,
            experts,
            shares,
        )

    def pieces(self) -> Iterator[Piece]:
        names, count = self._experts.names, self._experts.count
        stem, inner = f"{self._block}.experts", self._experts.inner
        every: list[tuple[str, str, str]] = []
        if self._online:
            yield from self._stacks(stem)
        else:
            for index in range(count):
                each = f"{stem}.{index}"
                parts = (f"{each}.{names.gate}", f"{each}.{names.up}", f"{each}.{names.down}")
                every.append(parts)
                yield from self._expert(index, parts, 0, inner)
        stem = f"{self._block}.{names.shared}"
        parts = (f"{stem}.gate_proj", f"{stem}.up_proj", f"{stem}.down_proj")
        # The shared block is cut into experts: rows of its gate and up projections, columns of its down projection.
        for index in range(self._experts.shared):
            yield from self._expert(count + index, parts, index * inner, self._experts.shared * inner)
        if self.input_scales is not None:
            yield from self._input_scales(self.input_scales, [*every, *[parts] * bool(self._experts.shared)])

    def _input_scales(self, into: Tensor, experts: Sequence[tuple[str, str, str]]) -> Iterator[Piece]:
        """Yield the reads of all experts' scales on every rank: inputs have the largest of them."""
        gates, downs = (
            ExpertInputScale(into[GATES], 2 * len(experts)),
            ExpertInputScale(into[DOWNS], len(experts)),
        )
        for gate, up, down in experts:
            yield gates.read(f"{gate}.input_scale")
            yield gates.read(f"{up}.input_scale")
            yield downs.read(f"{down}.input_scale")

    def _expert(self, index: int, names: tuple[str, str, str], at: int, whole: int) -> Iterator[Piece]:
        """Yield the reads of one expert, whose inner values begin at `at` in matrices of `whole` inner values."""
        gate, up, down = names
        begin, size, own = (
            at + self.share.inner.start,
            self.down.shape[1],
            range(at, at + self._experts.inner),
        )
        held = self.share.place(index)
        place = held or 0
        halves = self.gate_up[place].chunk(2)
        for half, (name, into) in enumerate(zip((gate, up), halves, strict=True)):
            codes = Piece.rows_of(f"{name}.weight", into, begin, whole)._replace(elsewhere=held is None)
            yield from self._matrix(name, codes, self._scales_of_half(place, half), range(size))
        codes = Piece(f"{down}.weight", self.down[place], (size, whole), (0, begin), elsewhere=held is None)
        yield from self._matrix(down, codes, self.down_scales[place], own)

    def _scales_of_half(self, place: int, half: int) -> Tensor:
        scales = self.gate_up_scales[place]
        return scales[half] if self._scheme.weights == BLOCK else scales.chunk(2)[half]

    def _matrix(self, name: str, codes: Piece, scales: Tensor, columns: range) -> Iterator[Piece]:
        """Yield the reads of one matrix and of its scales; `columns` are those of the expert on all ranks."""
        if self._online:
            yield quantising(codes, scales, columns)
            return
        yield codes
        of_weights = f"{name}.{self._scheme.scale}"
        if self._scheme.weights == TENSOR:
            read = tensor_scale(of_weights, scales)
        elif self._scheme.weights == CHANNEL:
            read = scales_of(Piece.rows_of(of_weights, scales[:, None], codes.begin[0], codes.whole[0]))
        else:
            read = block_scales(of_weights, scales, codes)
        yield read._replace(elsewhere=codes.elsewhere)

    def _stacks(self, stem: str) -> Iterator[Piece]:
        """Yield the reads of dense stacks, or of a matrix per expert, that are quantised while they are loaded.

        Each read is of one expert, because the values that are being quantised need several times their size.
        """
        count, inner, hidden = self._experts.count, self._experts.inner, self.down.shape[1]
        first, names = self.share.inner.start, self._experts.names
        for index in range(count):
            held = self.share.place(index)
            place, elsewhere = held or 0, held is None
            halves = self.gate_up[place].chunk(2)
            for half, (name, into) in enumerate(zip((names.gate, names.up), halves, strict=True)):
                whole, begin = (count, 2 * inner, hidden), (index, half * inner + first, 0)
                stack = Piece(f"{stem}.gate_up_proj", into[None], whole, begin)
                matrix = Piece(f"{index}.{name}.weight", into, (inner, hidden), (first, 0))
                yield _of_stack(stack, matrix, self._scales_of_half(place, half), elsewhere)
            into, whole = self.down[place], (count, hidden, inner)
            stack = Piece(f"{stem}.down_proj", into[None], whole, (index, 0, first))
            matrix = Piece(f"{index}.{names.down}.weight", into, (hidden, inner), (0, first))
            yield _of_stack(stack, matrix, self.down_scales[place], elsewhere)


def _of_stack(stack: Piece, matrix: Piece, scales: Tensor, elsewhere: bool) -> Piece:
    """Return the read of one expert from a dense stack, [1, rows, columns], with scales per row [rows].

    Args:
        matrix: the read instead if experts have a matrix each; its name continues that of the stack's module.
        elsewhere: another rank has the expert.
    """
    columns = range(matrix.whole[1])

    def alone(stack: Piece) -> Iterator[Piece]:
        name = f"{stack.name.rpartition('.')[0]}.{matrix.name}"
        yield quantising(matrix._replace(name=name, elsewhere=elsewhere), scales, columns)

    return quantising(stack, scales[None], columns)._replace(instead=alone, elsewhere=elsewhere)
