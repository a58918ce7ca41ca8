"""Experts with weights in FP8, stacked: one tensor of codes for gate and up, one for down, and their scales."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from common.checkpoint.experts_config import ExpertsConfig
from common.checkpoint.fp8_weights import BLOCK, CHANNEL, TENSOR, Fp8Scheme
from common.engine.formats.fp8_pieces import (
    block_scales,
    blocks_in,
    input_scale,
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
from common.kv_cache.plane import HeadGroup

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
        # The inner values of every expert that this rank computes.
        self._inner = placement.shard.addends(HeadGroup(experts.inner, 1), self._block)
        count, inner = experts.count + experts.shared, len(self._inner)
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
        if self._online:
            yield from self._stacks(stem)
        else:
            for index in range(count):
                each = f"{stem}.{index}"
                parts = (f"{each}.{names.gate}", f"{each}.{names.up}", f"{each}.{names.down}")
                yield from self._expert(index, parts, 0, inner)
        stem = f"{self._block}.{names.shared}"
        parts = (f"{stem}.gate_proj", f"{stem}.up_proj", f"{stem}.down_proj")
        # The shared block is cut into experts: rows of its gate and up projections, columns of its down projection.
        for index in range(self._experts.shared):
            yield from self._expert(count + index, parts, index * inner, self._experts.shared * inner)

    def _expert(self, index: int, names: tuple[str, str, str], at: int, whole: int) -> Iterator[Piece]:
        """Yield the reads of one expert, whose inner values begin at `at` in matrices of `whole` inner values."""
        gate, up, down = names
        begin, size, own = at + self._inner.start, self.down.shape[1], range(at, at + self._experts.inner)
        halves = self.gate_up[index].chunk(2)
        for half, (name, into) in enumerate(zip((gate, up), halves, strict=True)):
            codes = Piece.rows_of(f"{name}.weight", into, begin, whole)
            yield from self._matrix(name, codes, self._scales_of_half(index, half), GATES, range(size))
        codes = Piece(f"{down}.weight", self.down[index], (size, whole), (0, begin))
        yield from self._matrix(down, codes, self.down_scales[index], DOWNS, own)

    def _scales_of_half(self, index: int, half: int) -> Tensor:
        scales = self.gate_up_scales[index]
        return scales[half] if self._scheme.weights == BLOCK else scales.chunk(2)[half]

    def _matrix(self, name: str, codes: Piece, scales: Tensor, which: int, columns: range) -> Iterator[Piece]:
        """Yield the reads of one matrix and of its scales; `columns` are those of the expert on all ranks."""
        if self._online:
            yield quantising(codes, scales, columns)
            return
        yield codes
        of_weights = f"{name}.{self._scheme.scale}"
        if self._scheme.weights == TENSOR:
            yield tensor_scale(of_weights, scales)
        elif self._scheme.weights == CHANNEL:
            yield scales_of(Piece.rows_of(of_weights, scales[:, None], codes.begin[0], codes.whole[0]))
        else:
            yield block_scales(of_weights, scales, codes)
        if self.input_scales is not None:
            yield input_scale(f"{name}.input_scale", self.input_scales[which])

    def _stacks(self, stem: str) -> Iterator[Piece]:
        """Yield the reads of dense stacks, or of a matrix per expert, that are quantised while they are loaded."""
        count, inner, hidden = self._experts.count, self._experts.inner, self.down.shape[1]
        first, whole = self._inner.start, (count, 2 * inner, hidden)
        codes, scales = self.gate_up[:count].chunk(2, dim=1), self.gate_up_scales[:count].chunk(2, dim=1)
        names = self._experts.names
        for half, name in enumerate((names.gate, names.up)):
            stack = Piece(f"{stem}.gate_up_proj", codes[half], whole, (0, half * inner + first, 0))
            read = quantising(stack, scales[half], range(hidden))
            yield read._replace(instead=self._each(name, scales[half], rows=True))
        downs = Piece(f"{stem}.down_proj", self.down[:count], (count, hidden, inner), (0, 0, first))
        of_downs = self.down_scales[:count]
        read = quantising(downs, of_downs, range(inner))
        yield read._replace(instead=self._each(names.down, of_downs, rows=False))

    def _each(self, name: str, scales: Tensor, rows: bool) -> Callable[[Piece], Iterator[Piece]]:
        """Return what reads a matrix per expert instead of a stack; the names follow the stack's.

        Args:
            rows: the rows of the matrices are the inner values, else their columns.
        """
        inner, first = self._experts.inner, self._inner.start

        def read(stack: Piece) -> Iterator[Piece]:
            stem = stack.name.rpartition(".")[0]
            for index, into in enumerate(stack.into):
                tensor = f"{stem}.{index}.{name}.weight"
                whole = (inner, into.shape[1]) if rows else (into.shape[0], inner)
                codes = Piece(tensor, into, whole, (first, 0) if rows else (0, first))
                yield quantising(codes, scales[index], range(whole[1]))

        return read
