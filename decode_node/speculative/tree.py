"""Draft trees: the nodes that one target forward verifies for a request. Node 0, the root, is its last drawn token."""

from __future__ import annotations

import torch
from torch import Tensor

from common.engine.forward.draft_inputs import EagleVerifyInput


def tree(tokens: Tensor, parents: Tensor, depth: int) -> EagleVerifyInput:
    """From tokens and parents [B, N]; no node lies deeper than `depth`."""
    batch, nodes = tokens.shape
    index = torch.arange(nodes, device=tokens.device)
    mask = (index[:, None] == index).expand(batch, -1, -1)
    up = parents
    for _ in range(depth):
        mask = mask | (up[:, :, None] == index)  # -1 matches no node
        up = torch.where(up < 0, up, parents.gather(1, up.clamp(min=0)))
    return EagleVerifyInput(tokens, parents, mask.sum(-1) - 1, mask)


def select_nodes(scores: Tensor, parents: Tensor, topk: int, nodes: int) -> tuple[Tensor, Tensor]:
    """The nodes - 1 likeliest candidates: their flat indices, ascending [B, nodes - 1], and node parents [B, nodes].

    Among equals the lower index wins, so a parent is always kept before its child (spec/algorithms.md 6.4).

    Args:
        scores: [B, C] of flat candidates, level after level.
        parents: [B, >= C / topk] flat parent of candidates t with t // topk; -1 in the first entry: the root.
    """
    kept = scores.sort(dim=1, descending=True, stable=True).indices[:, : nodes - 1].sort(dim=1).values
    flat = parents.gather(1, kept // topk)
    found = torch.searchsorted(kept, flat.contiguous()) + 1
    above = torch.where(flat < 0, 0, found)
    return kept, torch.cat((torch.full_like(above[:, :1], -1), above), dim=1)
