"""Experts with weights in the dtype of the activations, stacked: one tensor for gate and up, one for down."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from common.checkpoint.experts_config import ExpertsConfig
from common.engine.layers.activations import DENSE, Activations
from common.engine.layers.expert_products import ExpertProducts
from common.engine.layers.piece import Piece
from common.engine.layers.placement import Placement, parameter
from common.engine.ops.expert_products import expert_parts


class DenseExperts(ExpertProducts):
    """The stacks, filled from stacked tensors of the checkpoint or from a matrix per expert."""

    reads = DENSE

    def __init__(self, name: str, hidden_size: int, experts: ExpertsConfig, placement: Placement) -> None:
        super().__init__()
        self._block = f"{name}.{experts.names.block}"
        self._experts = experts
        count, inner = experts.count + experts.shared, experts.inner
        self.gate_up = parameter((count, 2 * inner, hidden_size), placement)  # [E, 2 I, H], gates first
        self.down = parameter((count, hidden_size, inner), placement)  # [E, H, I]

    def parts(self, x: Activations, experts: Tensor, shares: Tensor) -> Tensor:
        return expert_parts(x.tensor(), self.gate_up, self.down, experts, shares)

    def pieces(self) -> Iterator[Piece]:
        count, stem = self._experts.count, f"{self._block}.experts"
        gate_up, down = (
            Piece.all_of(f"{stem}.{what}_proj", stack[:count])
            for what, stack in (("gate_up", self.gate_up), ("down", self.down))
        )
        yield gate_up._replace(instead=self._gates_and_ups)
        yield down._replace(instead=self._downs)
        yield from self._shared_pieces()

    def _gates_and_ups(self, stack: Piece) -> Iterator[Piece]:
        """Yield the matrices of a checkpoint without the tensor that `stack` names."""
        names, stem = self._experts.names, stack.name.removesuffix(".gate_up_proj")
        for index, both in enumerate(stack.into):
            gate, up = both.chunk(2)
            yield Piece.all_of(f"{stem}.{index}.{names.gate}.weight", gate)
            yield Piece.all_of(f"{stem}.{index}.{names.up}.weight", up)

    def _downs(self, stack: Piece) -> Iterator[Piece]:
        stem = stack.name.removesuffix(".down_proj")
        for index, down in enumerate(stack.into):
            yield Piece.all_of(f"{stem}.{index}.{self._experts.names.down}.weight", down)

    def _shared_pieces(self) -> Iterator[Piece]:
        """Cut the shared block into experts: rows of its gate and up projections, columns of its down projection."""
        count, shared, inner = self._experts.count, self._experts.shared, self._experts.inner
        stem, hidden = f"{self._block}.{self._experts.names.shared}", self.gate_up.shape[-1]
        for index in range(shared):
            at, expert = index * inner, count + index
            gate, up = self.gate_up[expert].chunk(2)
            yield Piece.rows_of(f"{stem}.gate_proj.weight", gate, at, shared * inner)
            yield Piece.rows_of(f"{stem}.up_proj.weight", up, at, shared * inner)
            yield Piece(f"{stem}.down_proj.weight", self.down[expert], (hidden, shared * inner), (0, at))
