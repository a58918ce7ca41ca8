"""One speculative step: draft, verify with one target forward, accept, and let the drafter see the outcome."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from common.engine.forward.batch import ForwardBatch, ForwardMode
from common.engine.kv_cache.relay_state import RelayState
from common.engine.kv_cache.request_table import RequestTable
from common.engine.model_runner import ModelRunner
from common.engine.overlap import Completion
from common.engine.sampler import SampleOutput, sample
from common.engine.sampling_plan import read_tokens
from decode_node.relay_sampling import sampling_batch
from decode_node.request import DecodeRequest, Emission
from decode_node.speculative.drafters.drafter import Drafter, Round, Verified
from decode_node.speculative.tree import DraftTree
from decode_node.speculative.verifier import Accepted, Acceptor


@dataclass(frozen=True, slots=True)
class LaunchedRound:
    """1 .. N tokens per request: those behind the nodes of the accepted path."""

    requests: Sequence[DecodeRequest]
    sampled: SampleOutput  # [B * N]
    accepted: Accepted
    nodes: int
    drafted: Sequence[int]
    completion: Completion

    def read(self) -> list[Emission]:
        params = [request.sampling for request in self.requests for _ in range(self.nodes)]
        drawn = read_tokens(self.sampled, params)
        paths, counts = self.accepted.path.tolist(), self.accepted.drafts.tolist()
        return [
            Emission(
                request,
                [drawn[row * self.nodes + node] for node in paths[row][: counts[row] + 1]],
                self.drafted[row],
            )
            for row, request in enumerate(self.requests)
        ]


class SpeculativeStep:
    """A `DecodeStep` of any drafter. Nothing in `launch` waits for the device.

    Positions behind a request's pages are never emitted (max_tokens comes first): their table entries are set to
    padding page 0, so that nothing is written there.
    """

    def __init__(
        self,
        runner: ModelRunner,
        drafter: Drafter,
        acceptor: Acceptor,
        table: RequestTable,
        relay: RelayState,
        page_size: int,
        device: torch.device,
        completion: Callable[[], Completion],
    ) -> None:
        self._runner = runner
        self._drafter = drafter
        self._acceptor = acceptor
        self._table = table
        self._relay = relay
        self._page_size = page_size
        self._device = device
        self._completion = completion

    @property
    def tokens_per_step(self) -> int:
        return self._drafter.reach

    @property
    def slack(self) -> int:
        return self._acceptor.slack

    @property
    def needs_results(self) -> bool:
        return self._drafter.needs_results

    @torch.inference_mode()
    def launch(self, requests: Sequence[DecodeRequest]) -> LaunchedRound:
        """Start one round. `request.launched` must not count it yet."""
        self._table.flush()
        relay, nodes = self._relay, self._drafter.nodes
        rows = self._to_device([request.row for request in requests])
        lengths = relay.seq_len[rows].to(torch.int64)
        longest = max(request.seq_len for request in requests) + self._drafter.reach
        table = self._page_table(requests, rows, longest)
        before = Round(requests, rows, relay.last_token[rows], lengths, table, longest)
        proposal = self._drafter.propose(before)
        batch = self._batch(proposal.trees, before)
        output = self._runner(batch)
        sampled = sample(
            output.logits,
            sampling_batch(relay, requests, rows.repeat_interleave(nodes), batch.positions + 1),
        )
        drawn = sampled.token_ids.view(-1, nodes)
        accepted = self._acceptor.accept(proposal.trees, drawn)
        self._acceptor.settle(accepted, batch.kv_slots.view(-1, nodes))
        end = accepted.path.gather(1, accepted.drafts[:, None])
        relay.last_token[rows] = drawn.gather(1, end)[:, 0]
        relay.seq_len[rows] = (lengths + accepted.drafts + 1).to(torch.int32)
        self._drafter.absorb(before, Verified(drawn, accepted, output.hidden))
        return LaunchedRound(tuple(requests), sampled, accepted, nodes, proposal.drafted, self._completion())

    def _page_table(
        self, requests: Sequence[DecodeRequest], rows: torch.Tensor, longest: int
    ) -> torch.Tensor:
        """[B, pages] that hold `longest` tokens; entries behind a request's own pages are page 0."""
        width = -(-longest // self._page_size)
        held = self._to_device(
            [len(request.lease.pages) for request in requests if request.lease is not None]
        )
        table = self._table.pages[rows, :width]
        table = F.pad(table, (0, width - table.shape[1]))
        return table.where(torch.arange(width, device=self._device) < held[:, None], 0)

    def _batch(self, trees: DraftTree, before: Round) -> ForwardBatch:
        lengths = before.seq_len
        count, nodes = trees.tokens.shape
        index = torch.arange(nodes, device=self._device)
        places = lengths[:, None] + index  # in slot order; positions follow the depth
        return ForwardBatch(
            mode=ForwardMode.VERIFY,
            input_ids=trees.tokens.reshape(-1),
            positions=(lengths[:, None] + trees.depth).view(-1),
            kv_slots=before.slots(places, self._page_size).view(-1),
            page_table=before.page_table,
            seq_lens=(lengths + nodes).to(torch.int32),
            query_start=(torch.arange(count + 1, device=self._device) * nodes).to(torch.int32),
            logits_rows=torch.arange(count * nodes, device=self._device),
            max_seq_len=before.longest,
            hidden_mode=self._drafter.hidden_mode,
            tree_mask=trees.mask,
        )

    def _to_device(self, values: Sequence[int]) -> torch.Tensor:
        tensor = torch.tensor(values, dtype=torch.int64)
        if self._device.type == "cuda":
            return tensor.pin_memory().to(self._device, non_blocking=True)
        return tensor
