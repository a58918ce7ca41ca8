"""Drafts by an EAGLE head as a tree: at every level the k likeliest paths grow, and the likeliest nodes are kept.

Flat candidate indices, as in spec/algorithms.md 6.4: level 0 has k candidates, every later one k * k. Source: EAGLE-2,
arXiv 2406.16858.
"""

from __future__ import annotations

import torch
from torch import Tensor

from common.engine.draft_runner import DraftRunner
from common.engine.forward.batch import ForwardBatch, ForwardMode
from common.engine.kv_cache.relay_state import RelayState
from decode_node.speculative.drafters.drafter import Proposal, Round
from decode_node.speculative.drafters.eagle import EagleDrafter
from decode_node.speculative.tree import select_nodes, tree


class EagleTreeDrafter(EagleDrafter):
    """Trees of `nodes`, the root included, at most `steps` drafts deep."""

    def __init__(
        self, runner: DraftRunner, relay: RelayState, steps: int, topk: int, nodes: int, page_size: int
    ) -> None:
        super().__init__(runner, relay, steps, page_size)
        self._topk = topk
        self._tree_nodes = nodes

    @property
    def nodes(self) -> int:
        return self._tree_nodes

    @property
    def reach(self) -> int:
        return max(self._tree_nodes, (self._steps - 1) * self._topk)

    def propose(self, batch: Round) -> Proposal:
        count, k = len(batch.requests), self._topk
        scores, tokens = [self._relay.draft_p[batch.rows]], [self._relay.draft_ids[batch.rows]]
        index = torch.arange(k, device=batch.rows.device)
        parents = [(torch.arange(k + 1, device=index.device) - 1).expand(count, -1)]
        ids, score = tokens[0], scores[0]  # of the k paths
        hidden = self._relay.draft_hidden[batch.rows][:, None].expand(-1, k, -1)
        above = torch.zeros(
            count, k, 0, dtype=torch.bool, device=index.device
        )  # ancestors of each path's end
        mask = above[:, :0]
        all_ids, all_hidden = ids[:, :0], hidden[:, :0]
        for level in range(1, self._steps):
            all_ids, all_hidden = torch.cat((all_ids, ids), 1), torch.cat((all_hidden, hidden), 1)
            own = (index[:, None] == index).expand(count, -1, -1)
            above = torch.cat((above, own), 2)
            mask = torch.cat((torch.nn.functional.pad(mask, (0, k)), above), 1)
            state = self._runner.step(
                self._level_batch(batch, all_ids, mask), all_hidden.reshape(-1, hidden.shape[-1])
            )
            grown = (score[:, :, None] * state.probs.view(count, k, k)).view(count, -1)
            following = state.ids.view(count, -1)
            scores.append(grown)
            tokens.append(following)
            chosen = grown.sort(dim=1, descending=True, stable=True).indices[:, :k]
            parents.append(chosen + k + (level - 1) * k * k)
            beam = chosen // k
            score, ids = grown.gather(1, chosen), following.gather(1, chosen)
            hidden = state.hidden.view(count, k, -1)
            hidden = hidden.gather(1, beam[:, :, None].expand(-1, -1, hidden.shape[-1]))
            above = above.gather(1, beam[:, :, None].expand(-1, -1, above.shape[-1]))
        kept, nodes_parents = select_nodes(torch.cat(scores, 1), torch.cat(parents, 1), k, self.nodes)
        drafts = torch.cat(tokens, 1).gather(1, kept)
        trees = tree(torch.cat((batch.last_token[:, None], drafts), 1), nodes_parents, self._steps)
        return Proposal(trees, [self.nodes - 1] * count)

    def _level_batch(self, batch: Round, ids: Tensor, mask: Tensor) -> ForwardBatch:
        """All levels so far again, the newest k rows wanted: the branches lie side by side behind the prefix."""
        count, width = ids.shape
        index = torch.arange(width, device=ids.device)
        newest = torch.arange(count, device=ids.device)[:, None] * width + index[-self._topk :]
        places = batch.seq_len[:, None] + index
        return ForwardBatch(
            mode=ForwardMode.VERIFY,
            input_ids=ids.reshape(-1),
            positions=(batch.seq_len[:, None] + index // self._topk).view(-1),
            kv_slots=batch.slots(places, self._page_size).view(-1),
            page_table=batch.page_table,
            seq_lens=(batch.seq_len + width).to(torch.int32),
            query_start=(torch.arange(count + 1, device=ids.device) * width).to(torch.int32),
            logits_rows=newest.view(-1),
            max_seq_len=batch.longest,
            tree_mask=mask,
        )
