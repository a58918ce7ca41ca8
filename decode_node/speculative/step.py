"""One speculative step: draft, verify with one target forward, accept, and let the drafter see the outcome."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from common.engine.cuda_graph.node_graphs import NodeGraphs
from common.engine.cuda_graph.rules import Phase
from common.engine.host_copies import on_device
from common.engine.kv_cache.request_table import RequestTable
from common.engine.overlap import Completion
from common.engine.sampling_plan import read_tokens, sampling_variant
from common.engine.stopwatch import Stopwatch
from decode_node.request import DecodeRequest, Emission
from decode_node.speculative.drafters.drafter import Drafter, Look
from decode_node.speculative.rounds import RoundCall
from decode_node.speculative.verifier import Acceptor
from decode_node.speculative.verify import Emitted, Verify

PHASES = (Phase.DRAFT.value, Phase.VERIFY.value, Phase.DRAFT_EXTEND.value)


def no_seconds() -> dict[str, float]:
    """Time of each phase, so far none."""
    return dict.fromkeys(PHASES, 0.0)


@dataclass(frozen=True, slots=True)
class LaunchedRound:
    """1 .. N tokens per request: those behind the nodes of the accepted path."""

    requests: Sequence[DecodeRequest]
    emitted: Emitted
    drafted: Sequence[int]
    completion: Completion
    watch: Stopwatch
    phase_seconds: dict[str, float]  # of the step, which this round is added to

    def read(self) -> list[Emission]:
        emissions, _ = self.read_timed()
        return emissions

    def read_timed(self) -> tuple[list[Emission], float]:
        """With the seconds that the round took on the device."""
        laps = self.watch.seconds()
        for phase, seconds in zip(PHASES, laps, strict=True):
            self.phase_seconds[phase] += seconds
        sampled, counts = self.emitted.read()
        depth = len(sampled.token_ids) // max(len(self.requests), 1)
        params = [request.sampling for request in self.requests for _ in range(depth)]
        drawn = read_tokens(sampled, params)
        emissions = [
            Emission(request, drawn[row * depth : row * depth + counts[row]], self.drafted[row])
            for row, request in enumerate(self.requests)
        ]
        return emissions, sum(laps)


class SpeculativeStep:
    """A `DecodeStep` of any drafter. Nothing in `launch` waits for the device."""

    def __init__(
        self,
        verify: Verify,
        drafter: Drafter,
        acceptor: Acceptor,
        table: RequestTable,
        device: torch.device,
        completion: Callable[[], Completion],
        stopwatch: Callable[[], Stopwatch],
        phase_seconds: dict[str, float],
    ) -> None:
        """`phase_seconds`, as `no_seconds` makes it, is added to; steps may share one."""
        self._verify = verify
        self._drafter = drafter
        self._acceptor = acceptor
        self._table = table
        self._device = device
        self._completion = completion
        self._stopwatch = stopwatch
        self.phase_seconds = phase_seconds

    @property
    def tokens_per_step(self) -> int:
        return self._drafter.reach

    @property
    def slack(self) -> int:
        return self._acceptor.slack

    @property
    def needs_results(self) -> bool:
        return self._drafter.needs_results

    @property
    def graphs(self) -> list[NodeGraphs[Any]]:
        """Of all phases, in the order of a round."""
        phases = [*self._drafter.phases, self._verify.phase]
        phases.sort(key=lambda phase: PHASES.index(phase.graphs.spec.phase))
        return [phase.node_graphs for phase in phases]

    def launch(self, requests: Sequence[DecodeRequest]) -> LaunchedRound:
        """Start one round. `request.launched` must not count it yet."""
        self._table.flush()
        look = self._drafter.look(requests)
        call = self._call(requests, look)
        watch = self._stopwatch()
        self._drafter.propose(call)
        watch.lap()
        emitted = self._verify(call).on_host()
        watch.lap()
        self._drafter.absorb(call)
        watch.lap()
        done = self._completion()
        return LaunchedRound(tuple(requests), emitted, look.drafted, done, watch, self.phase_seconds)

    def _call(self, requests: Sequence[DecodeRequest], look: Look) -> RoundCall:
        """All that the host has to say, in one copy."""
        told: list[list[int]] = []
        for index, request in enumerate(requests):
            assert request.lease is not None
            drafts = () if look.drafts is None else look.drafts[index]
            told.append([request.row, len(request.lease.pages), *drafts])
        values = on_device(told, self._device)
        sampling = sampling_variant(request.sampling for request in requests)
        return RoundCall(values[:, :2], sampling, None if look.drafts is None else values[:, 2:])
