"""The choice of experts for each token, and their shares: see `RouterRule` in common/checkpoint/experts_config.py."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from common.engine.ops.registration import register_op


def route_reference(
    x: Tensor,
    rows: Tensor,
    correction: Tensor | None,
    chosen: int,
    shared: int,
    shared_gate: bool,
    sigmoid: bool,
    groups: int,
    kept_groups: int,
    normalised: bool,
    epsilon: float,
    scaling: float,
) -> tuple[Tensor, Tensor]:
    """Return (experts [T, K] int32, shares [T, K] float32) for x [T, H], K = chosen + shared.

    Args:
        rows: [E, H]; with `shared_gate` [E + 1, H], whose last row gives the logit of the share of shared experts.
        correction: [E] float32, added to the scores for the choice.
        shared: number of shared experts, E .. E + shared - 1, which every token has.
    """
    logits = F.linear(x.float(), rows.float())  # [T, E]
    gate = logits[:, -1:].sigmoid() if shared_gate else torch.ones_like(logits[:, :1])
    logits = logits[:, : logits.shape[1] - shared_gate]
    scores = logits.sigmoid() if sigmoid else logits.softmax(-1)
    ranked = scores if correction is None else scores + correction
    if groups > 1:
        by_group = ranked.view(len(x), groups, -1)  # [T, groups, E / groups]
        worth = by_group.topk(2, dim=-1).values.sum(-1)
        kept = torch.zeros_like(worth).scatter(1, worth.topk(kept_groups).indices, 1.0)
        ranked = by_group.masked_fill(kept[:, :, None] == 0, -torch.inf).flatten(1)
    experts = ranked.topk(chosen).indices
    shares = scores.gather(1, experts)
    if normalised:
        shares = shares / (shares.sum(-1, keepdim=True) + epsilon)
    always = torch.arange(shared, device=x.device) + logits.shape[1]
    experts = torch.cat([experts, always.expand(len(x), -1)], dim=1)
    shares = torch.cat([shares * scaling, gate.expand(-1, shared)], dim=1)
    return experts.to(torch.int32), shares


def _fake(
    x: Tensor,
    rows: Tensor,
    correction: Tensor | None,
    chosen: int,
    shared: int,
    shared_gate: bool,
    sigmoid: bool,
    groups: int,
    kept_groups: int,
    normalised: bool,
    epsilon: float,
    scaling: float,
) -> tuple[Tensor, Tensor]:
    shape = (x.shape[0], chosen + shared)
    return x.new_empty(shape, dtype=torch.int32), x.new_empty(shape, dtype=torch.float32)


route = register_op("route", route_reference, mutates=(), fake=_fake)
