"""The router of a layer with experts: it chooses the experts of each token and their shares."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

import torch
from torch import Tensor, nn

from common.checkpoint.experts_config import SIGMOID, ExpertsConfig
from common.engine.attention.backend import TokenSlots
from common.engine.layers.piece import Piece
from common.engine.layers.placement import Placement, parameter
from common.engine.ops.route import route

# The arguments of `route` after x.
Rule: TypeAlias = tuple[
    Tensor, Tensor | None, Tensor | None, int, int, int, bool, bool, int, int, bool, float, float
]


class ExpertRouter(nn.Module):
    """Applies the `RouterRule` of a config.

    Args:
        name: prefix of the layer's tensors in the checkpoint.
    """

    def __init__(self, name: str, hidden_size: int, experts: ExpertsConfig, placement: Placement) -> None:
        super().__init__()
        self._name, self.experts = name, experts
        # [E, H]; with a gate of the shared experts [E + 1, H], whose last row is that gate
        self.rows = parameter((experts.count + experts.shared_gate, hidden_size), placement)
        self.correction: nn.Parameter | None = None
        if experts.router.corrected:
            # [E] float32 in any model: small differences decide the choice
            self.correction = parameter((experts.count,), Placement(torch.float32, placement.device))

    def forward(self, x: Tensor, slots: TokenSlots | None) -> tuple[Tensor, Tensor]:
        """Return (experts [T, K] int32, shares [T, K] float32) for x [T, H]; the shared experts come last."""
        return route(x, *self.rule(slots))

    def rule(self, slots: TokenSlots | None) -> Rule:
        """Return the arguments of `route` that follow the rows of a batch."""
        rule = self.experts.router
        kv_slots, page_size = (None, 0) if slots is None else slots
        return (
            self.rows,
            self.correction,
            kv_slots,
            page_size,
            rule.chosen,
            self.experts.shared,
            self.experts.shared_gate,
            rule.scores == SIGMOID,
            rule.groups,
            rule.kept_groups,
            rule.normalised,
            rule.epsilon,
            rule.scaling,
        )

    def pieces(self) -> Iterator[Piece]:
        count, names = self.experts.count, self.experts.names
        block = f"{self._name}.{names.block}"
        yield Piece.all_of(f"{block}.gate.weight", self.rows[:count])
        if self.correction is not None:
            yield Piece.all_of(f"{block}.{names.correction}", self.correction)
        if self.experts.shared_gate:
            yield Piece.all_of(f"{block}.{names.shared_gate}.weight", self.rows[count:])
