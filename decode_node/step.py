"""One step of a batch: what comes in are requests, what goes out is a list of tokens per request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from common.engine.forward.batch import ForwardBatch, ForwardMode
from common.engine.kv_cache.relay_state import RelayState
from common.engine.kv_cache.request_table import RequestTable
from common.engine.model_runner import ModelRunner
from common.engine.overlap import Completion
from common.engine.sampler import SampleOutput, SamplingBatch, sample
from common.engine.sampling_plan import read_tokens, sampling_variant
from decode_node.request import DecodeRequest, Emission


class LaunchedStep(Protocol):
    """A step under way; `read` only after `completion`."""

    @property
    def completion(self) -> Completion: ...
    @property
    def requests(self) -> Sequence[DecodeRequest]: ...
    def read(self) -> list[Emission]: ...


class DecodeStep(Protocol):
    """Plain decoding or speculation: the node does not know which."""

    @property
    def tokens_per_step(self) -> int:
        """KV slots that one step may write per request."""
        ...

    def launch(self, requests: Sequence[DecodeRequest]) -> LaunchedStep: ...


@dataclass(frozen=True, slots=True)
class LaunchedAutoregressive:
    """One drawn token per request, in order."""

    requests: Sequence[DecodeRequest]
    sampled: SampleOutput
    completion: Completion

    def read(self) -> list[Emission]:
        tokens = read_tokens(self.sampled, [request.sampling for request in self.requests])
        return [Emission(request, [token]) for request, token in zip(self.requests, tokens)]


class AutoregressiveStep:
    """One token per request: gather the relay rows, forward, draw, scatter. No host synchronisation."""

    tokens_per_step = 1

    def __init__(
        self,
        runner: ModelRunner,
        table: RequestTable,
        relay: RelayState,
        page_size: int,
        device: torch.device,
        completion: Callable[[], Completion],
    ) -> None:
        self._runner = runner
        self._table = table
        self._relay = relay
        self._page_size = page_size
        self._device = device
        self._completion = completion

    @torch.inference_mode()
    def launch(self, requests: Sequence[DecodeRequest]) -> LaunchedAutoregressive:
        """Start one step. `request.launched` must not count this step yet."""
        self._table.flush()
        relay, count = self._relay, len(requests)
        rows = torch.tensor([request.row for request in requests], dtype=torch.int64)
        if self._device.type == "cuda":
            rows = rows.pin_memory().to(self._device, non_blocking=True)
        longest = max(request.seq_len for request in requests) + 1
        table = self._table.pages[rows, : -(-longest // self._page_size)]
        lengths = relay.seq_len[rows]
        positions = lengths.to(torch.int64)
        page = table.gather(1, (positions // self._page_size)[:, None])[:, 0].to(torch.int64)
        steps = torch.arange(count + 1, device=self._device)
        output = self._runner(
            ForwardBatch(
                mode=ForwardMode.DECODE,
                input_ids=relay.last_token[rows],
                positions=positions,
                kv_slots=page * self._page_size + positions % self._page_size,
                page_table=table,
                seq_lens=lengths + 1,
                query_start=steps.to(torch.int32),
                logits_rows=steps[:count],
                max_seq_len=longest,
            )
        )
        sampled = sample(output.logits, self._sampling(requests, rows, positions + 1))
        relay.last_token[rows] = sampled.token_ids
        relay.seq_len[rows] = lengths + 1
        return LaunchedAutoregressive(tuple(requests), sampled, self._completion())

    def _sampling(
        self, requests: Sequence[DecodeRequest], rows: torch.Tensor, position: torch.Tensor
    ) -> SamplingBatch:
        variant = sampling_variant(request.sampling for request in requests)
        relay = self._relay
        return SamplingBatch(
            temperature=relay.temperature[rows],
            top_p=relay.top_p[rows],
            top_k=relay.top_k[rows],
            seed=relay.seed[rows],
            position=position,
            all_greedy=variant.all_greedy,
            any_filter=variant.any_filter,
            num_logprobs=variant.num_logprobs,
        )
