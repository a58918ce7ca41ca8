"""Experts with weights in the dtype of the activations, stacked: one tensor for gate and up, one for down."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor

from common.checkpoint.experts_config import ExpertsConfig
from common.engine.attention.backend import TokenSlots
from common.engine.layers.activations import DENSE, Activations
from common.engine.layers.expert_products import ExpertProducts
from common.engine.layers.piece import Piece
from common.engine.layers.placement import Placement, parameter
from common.engine.layers.router import ExpertRouter
from common.engine.ops.expert_products import expert_parts
from common.engine.ops.few_experts import add_experts, fuses_experts


class DenseExperts(ExpertProducts):
    """The stacks, filled from stacked tensors of the checkpoint or from a matrix per expert."""

    reads = DENSE

    def __init__(self, name: str, hidden_size: int, experts: ExpertsConfig, placement: Placement) -> None:
        super().__init__()
        self._block = f"{name}.{experts.names.block}"
        self._experts = experts
        total = experts.count + experts.shared
        self.share = placement.ranks.expert_share(total, experts.inner, self._block)
        count, inner = len(self.share.experts), len(self.share.inner)
        self.gate_up = parameter((count, 2 * inner, hidden_size), placement)  # [E, 2 I, H], gates first
        self.down = parameter((count, hidden_size, inner), placement)  # [E, H, I]

    def parts(self, x: Activations, experts: Tensor, shares: Tensor) -> Tensor:
        return expert_parts(x.tensor(), self.gate_up, self.down, experts, shares)

    def added(
        self, x: Activations, stream: Tensor, router: ExpertRouter, slots: TokenSlots | None
    ) -> Tensor | None:
        if not fuses_experts(stream, self.gate_up):
            return None
        return add_experts(x.tensor(), stream, self.gate_up, self.down, *router.rule(slots))

    def pieces(self) -> Iterator[Piece]:
        count, stem, begin = self._experts.count, f"{self._block}.experts", self.share.experts.start
        held = max(min(self.share.experts.stop, count) - begin, 0)  # routed experts
        gates, ups = self.gate_up.chunk(2, dim=1)
        first, inner, hidden = self.share.inner.start, self._experts.inner, self.down.shape[1]
        whole, names = (count, 2 * inner, hidden), self._experts.names

        def each(
            name: str, into: Tensor, read: Callable[[str, Tensor, int, int], Piece]
        ) -> Callable[[Piece], Iterator[Piece]]:
            """Return what reads a checkpoint with one matrix per expert instead of a stack.

            The names follow the stack's, which may have got another prefix.
            """

            def of_expert(stack: Piece, index: int) -> Piece:
                place = self.share.place(index)
                expert = f"{stack.name.rpartition('.')[0]}.{index}.{name}.weight"
                return read(expert, into[place or 0], 0, inner)._replace(elsewhere=place is None)

            return lambda stack: (of_expert(stack, index) for index in range(count))

        for name, into, axes, at, instead in (
            ("gate_up_proj", gates, whole, (begin, first, 0), each(names.gate, gates, self._rows)),
            ("gate_up_proj", ups, whole, (begin, inner + first, 0), each(names.up, ups, self._rows)),
            (
                "down_proj",
                self.down,
                (count, hidden, inner),
                (begin, 0, first),
                each(names.down, self.down, self._columns),
            ),
        ):
            yield Piece(f"{stem}.{name}", into[:held], axes, at, instead, elsewhere=not held)
        yield from self._shared_pieces()

    def _shared_pieces(self) -> Iterator[Piece]:
        """Cut the shared block into experts: rows of its gate and up projections, columns of its down projection."""
        count, shared, inner = self._experts.count, self._experts.shared, self._experts.inner
        stem, whole = f"{self._block}.{self._experts.names.shared}", shared * inner
        for index in range(shared):
            place = self.share.place(count + index)
            gate, up = self.gate_up[place or 0].chunk(2)
            for piece in (
                self._rows(f"{stem}.gate_proj.weight", gate, index * inner, whole),
                self._rows(f"{stem}.up_proj.weight", up, index * inner, whole),
                self._columns(f"{stem}.down_proj.weight", self.down[place or 0], index * inner, whole),
            ):
                yield piece._replace(elsewhere=place is None)

    def _rows(self, name: str, into: Tensor, expert: int, whole: int) -> Piece:
        """Return the read of this rank's rows of an expert whose rows begin at `expert` in a matrix of `whole` rows."""
        return Piece.rows_of(name, into, expert + self.share.inner.start, whole)

    def _columns(self, name: str, into: Tensor, expert: int, whole: int) -> Piece:
        """Return the same read of columns."""
        return Piece(name, into, (len(into), whole), (0, expert + self.share.inner.start))
