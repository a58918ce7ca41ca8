"""The rotary embedding of one model: its frequencies, and a batch's angles, computed once for all layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from common.checkpoint.rope_config import RopeConfig
from common.engine.layers.placement import Placement
from common.engine.ops.rotary import inverse_frequencies, rotary_angles, rotary_angles_by_axis


class Rotary(nn.Module):
    """Angles for the first D dimensions of heads: `rope.rotated_dims(head_dim)`."""

    inv_freq: Tensor  # [D/2] float32
    axes: Tensor  # [D/2] int64, the position axis of each frequency; [0] if there is one axis

    def __init__(self, rope: RopeConfig, head_dim: int, placement: Placement) -> None:
        super().__init__()
        self._factor = rope.attention_factor
        self._dtype: torch.dtype = placement.dtype
        inv_freq = inverse_frequencies(rope, rope.rotated_dims(head_dim)).to(placement.device)
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        axes = torch.tensor(rope.axis_of_frequencies(), dtype=torch.int64, device=placement.device)
        self.register_buffer("axes", axes, persistent=False)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return (cos, sin), each [T, 1, D], for positions int64 [T], or [T, A] on the axes of the config; see
        `ops/rotary`.
        """
        if positions.ndim == 2:
            return rotary_angles_by_axis(positions, self.axes, self.inv_freq, self._factor, self._dtype)
        return rotary_angles(positions, self.inv_freq, self._factor, self._dtype)
