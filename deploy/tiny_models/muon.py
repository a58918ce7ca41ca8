"""The Muon optimizer for the matrices inside the layers and stacks of them, batched by shape.

One update is the momentum orthogonalized by five Newton-Schulz steps (Jordan et al. 2024), scaled so that its RMS
matches AdamW's (Liu et al. 2025, "Muon is scalable"): both optimizers take the same learning rate. Matrices of one
shape are stacked, because a model this small is limited by kernel launches.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

_NS_COEFFICIENTS = (3.4445, -4.7750, 2.0315)


MATRIX_SIZE = 16  # rows and columns from which a parameter counts as a matrix


def is_matrix(parameter: Tensor) -> bool:
    """Return whether Muon is for this parameter: a matrix, or a stack of matrices such as the experts of a layer."""
    return parameter.ndim >= 2 and min(parameter.shape[-2:]) >= MATRIX_SIZE


def orthogonalize(matrices: Tensor, steps: int = 5) -> Tensor:
    """Run the Newton-Schulz iteration on `[..., rows, cols]`: singular values end near 1. bf16 suffices on CUDA."""
    a, b, c = _NS_COEFFICIENTS
    x = matrices.bfloat16() if matrices.is_cuda else matrices.float()
    wide = x.size(-2) > x.size(-1)
    x = x.mT if wide else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    back: Tensor = x.mT if wide else x
    return back.float()


class Muon(torch.optim.Optimizer):
    """Muon with Nesterov momentum 0.95 and decoupled weight decay, for parameters of which `is_matrix` is true."""

    def __init__(
        self, params: Iterable[Tensor], lr: float, momentum: float = 0.95, weight_decay: float = 0.1
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        assert closure is None, "Muon takes no closure"
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = defaultdict(list)
            for param in group["params"]:
                if param.grad is not None:
                    by_shape[param.shape].append(param)
            for params in by_shape.values():
                self._update(params, group["lr"], group["momentum"], group["weight_decay"])

    def _update(self, params: list[Tensor], lr: float, momentum: float, weight_decay: float) -> None:
        buffers = [self.state[p].setdefault("momentum", torch.zeros_like(p)) for p in params]
        grads = [p.grad for p in params if p.grad is not None]
        torch._foreach_lerp_(buffers, grads, 1 - momentum)
        nesterov = torch.stack(torch._foreach_lerp(grads, buffers, momentum))
        scale = 0.2 * max(params[0].shape[-2:]) ** 0.5
        updates = orthogonalize(nesterov).mul_(scale)
        torch._foreach_mul_(params, 1 - lr * weight_decay)
        torch._foreach_add_(params, list(updates.unbind()), alpha=-lr)
