"""Drafts by an EAGLE head as a tree: at every level the k most likely paths grow, and the most likely nodes are kept.

Candidates are indexed flat: level 0 has k candidates, every later level k * k. Source: EAGLE-2, arXiv 2406.16858.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from common.engine.forward.batch import ForwardMode
from common.engine.forward.draft_inputs import DraftInput, TreeVerifyInput
from common.engine.forward.draft_runner import DraftRunner
from decode_node.speculative.rounds import Round
from decode_node.speculative.tree import replace_drafts, select_nodes, tree


class TreeGrowth:
    """Trees of `nodes`, including the root, at most `steps` drafts deep."""

    mode = ForwardMode.VERIFY

    def __init__(self, runner: DraftRunner, steps: int, topk: int, nodes: int) -> None:
        self._runner = runner
        self._topk = topk
        self.steps = min(steps, nodes - 1)  # nodes are kept with their ancestors, so deeper levels never fit
        self.nodes = nodes
        self.lookahead_slots = max(nodes, (self.steps - 1) * topk)

    def grow(self, batch: Round, start: DraftInput, tree: TreeVerifyInput) -> None:
        """Grow the tree. The k rows of a level attend to the prefix and to their own ancestors in earlier levels."""
        count, k, width = batch.count, self._topk, start.hidden.shape[1]
        scores, tokens = [start.draft_topk_probs], [start.draft_topk_ids]
        parents = [(batch.index[: k + 1] - 1).expand(count, -1)]
        # of the k paths
        ids, score = start.draft_topk_ids, start.draft_topk_probs
        hidden = start.hidden[:, None].expand(-1, k, -1)
        index, rows = batch.index[:k], batch.index[: count * k]
        own = (index[:, None] == index).expand(count, -1, -1)
        above = own[:, :, :0]  # [R, k, slots so far]: the slots that the end of each path attends to
        for level in range(1, self.steps):
            above = torch.cat((above, own), 2)
            depth = (batch.index[level - 1 : level]).expand(k)
            state = self._runner.step(batch.window(ids, depth, above, rows), hidden.flatten(0, 1))
            grown = (score[:, :, None] * state.draft_topk_probs.view(count, k, k)).view(count, k * k)
            following = state.draft_topk_ids.view(count, k * k)
            scores.append(grown)
            tokens.append(following)
            chosen = grown.sort(dim=1, descending=True, stable=True).indices[:, :k]
            parents.append(chosen + (k + (level - 1) * k * k))
            beam = (chosen // k)[:, :, None]
            score, ids = grown.gather(1, chosen), following.gather(1, chosen)
            hidden = state.hidden.view(count, k, width).gather(1, beam.expand(-1, -1, width))
            above = above.gather(1, beam.expand(-1, -1, above.shape[-1]))
        kept, nodes = select_nodes(torch.cat(scores, 1), torch.cat(parents, 1), k, self.nodes)
        self._plant(tree, torch.cat(tokens, 1).gather(1, kept), nodes)

    def force(self, forced: Tensor, into: TreeVerifyInput) -> None:
        """Turn the trees of rows with forced tokens into chains of them; their other nodes hang below the last one."""
        count = (forced >= 0).sum(1, keepdim=True)  # [R, 1]
        index = torch.arange(self.nodes, device=forced.device)
        chain = torch.minimum(index - 1, count)
        planted = tree(into.tokens, torch.where(count > 0, chain, into.parents), self.steps + 1)
        replace_drafts(planted.tokens[:, 1:], forced)
        into.parents.copy_(planted.parents)
        into.depth.copy_(planted.depth)
        into.mask.copy_(planted.mask)

    def _plant(self, into: TreeVerifyInput, drafts: Tensor, parents: Tensor) -> None:
        planted = tree(F.pad(drafts, (1, 0)), parents, self.steps)
        into.tokens.copy_(planted.tokens)
        into.parents.copy_(planted.parents)
        into.depth.copy_(planted.depth)
        into.mask.copy_(planted.mask)
