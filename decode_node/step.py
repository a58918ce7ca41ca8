"""One step of a batch: what comes in are requests, what goes out is a list of tokens per request."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

import torch

from common.engine.cuda_graph.decode_graph import DecodeGraphs
from common.engine.host_copies import on_device
from common.engine.kv_cache.request_table import RequestTable
from common.engine.overlap import Completion
from common.engine.sampler import SampleOutput
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
        """KV slots that one step may write, and tokens that it may draw, per request."""
        ...

    @property
    def slack(self) -> int:
        """KV slots that it may need behind the last token of a request: its branches lie side by side."""
        ...

    @property
    def needs_results(self) -> bool:
        """The step reads the text that the host knows: a request sits out while a step of its own is unread."""
        ...

    @property
    def phase_seconds(self) -> Mapping[str, float]:
        """Time on the device by the parts of a step, of all steps that were read; it goes on growing."""
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
    slack = 0
    needs_results = False
    phase_seconds: Mapping[str, float] = MappingProxyType({})  # one part: the steps themselves

    def __init__(
        self,
        decode: DecodeGraphs,
        table: RequestTable,
        device: torch.device,
        completion: Callable[[], Completion],
    ) -> None:
        self._decode = decode
        self._table = table
        self._device = device
        self._completion = completion

    def launch(self, requests: Sequence[DecodeRequest]) -> LaunchedAutoregressive:
        """Start one step. `request.launched` must not count this step yet."""
        self._table.flush()
        rows = on_device([request.row for request in requests], self._device)
        sampled = self._decode(rows, sampling_variant(request.sampling for request in requests))
        return LaunchedAutoregressive(tuple(requests), sampled.on_host(), self._completion())
