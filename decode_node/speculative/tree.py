"""Draft trees: the nodes that one target forward verifies for a request. Node 0, the root, is its last drawn token."""

from __future__ import annotations

import torch
from torch import Tensor

from common.engine.forward.draft_inputs import TreeVerifyInput


def tree(tokens: Tensor, parents: Tensor, depth: int) -> TreeVerifyInput:
    """Build the verify input from tokens and parents [B, N]; `depth` bounds the depth of every node."""
    batch, nodes = tokens.shape
    index = torch.arange(nodes, device=tokens.device)
    mask = (index[:, None] == index).expand(batch, -1, -1)
    up = parents
    for _ in range(depth):
        mask = mask | (up[:, :, None] == index)  # -1 equals no node index
        up = torch.where(up < 0, up, parents.gather(1, up.clamp(min=0)))
    return TreeVerifyInput(tokens, parents, mask.sum(-1) - 1, mask)


def replace_drafts(drafts: Tensor, forced: Tensor) -> None:
    """Replace drafts [B, N] in place by `forced` [B, N] wherever that is not -1."""
    drafts.copy_(torch.where(forced >= 0, forced, drafts))


def select_nodes(scores: Tensor, parents: Tensor, topk: int, nodes: int) -> tuple[Tensor, Tensor]:
    """Select the nodes - 1 most likely candidates: ascending flat indices [B, nodes - 1] and node parents [B, nodes].

    Among equal scores the lower index wins, so a parent is always kept together with its child.

    Args:
        scores: [B, C] of flat candidates, level by level.
        parents: [B, >= C / topk] flat parent of the candidates t with the same t // topk; -1 in the first entry, the
        root.
    """
    kept = scores.sort(dim=1, descending=True, stable=True).indices[:, : nodes - 1].sort(dim=1).values
    flat = parents.gather(1, kept // topk)
    found = torch.searchsorted(kept, flat.contiguous()) + 1
    above = torch.where(flat < 0, 0, found)
    return kept, torch.cat((torch.full_like(above[:, :1], -1), above), dim=1)
