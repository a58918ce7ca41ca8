"""Linear layers, also of several checkpoint matrices merged into one product."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.engine.layers.placement import Placement, parameter
from common.engine.ops.linear import linear


class Linear(nn.Module):
    """y = x W^T + b with the rows of W divided among checkpoint tensors: {"q_proj": rows, ...}."""

    def __init__(self, in_features: int, parts: Mapping[str, int], bias: bool, placement: Placement) -> None:
        super().__init__()
        rows = sum(parts.values())
        self.parts = dict(parts)
        self.weight = parameter((rows, in_features), placement)  # [out, in]
        self.bias = parameter((rows,), placement) if bias else None  # [out]

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out], the parts one after another."""
        return linear(x, self.weight, self.bias)

    def checkpoint_tensors(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        """(name in the checkpoint, view of our storage that it fills)."""
        start = 0
        for name, rows in self.parts.items():
            yield f"{prefix}.{name}.weight", self.weight[start : start + rows]
            if self.bias is not None:
                yield f"{prefix}.{name}.bias", self.bias[start : start + rows]
            start += rows


class Embedding(nn.Module):
    """Token embedding, whose weight may serve as the LM head too."""

    def __init__(self, vocab_size: int, hidden_size: int, placement: Placement) -> None:
        super().__init__()
        self.weight = parameter((vocab_size, hidden_size), placement)  # [V, H]

    def forward(self, ids: Tensor) -> Tensor:
        """[T] int64 -> [T, H]."""
        return F.embedding(ids, self.weight)


def logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """hidden [R, H] times an LM head [V, H]: [R, V] float32."""
    return linear(hidden, weight, None).to(torch.float32)
