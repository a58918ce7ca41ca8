"""SwiGLU's product: silu(gate) * up."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def silu_mul(gate_up: Tensor) -> Tensor:
    """[..., 2 * I] with gate first -> [..., I] (arXiv 2002.05202)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
