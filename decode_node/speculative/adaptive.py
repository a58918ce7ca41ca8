"""A step of changing width: as many drafts in a row as its policy chooses for the batch.

Each width is a step of its own, with its own graphs, over the same relay rows and pools: a chain's state between rounds
does not depend on how many drafts come next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from common.engine.cuda_graph.node_graphs import NodeGraphs
from common.engine.overlap import Completion
from decode_node.request import DecodeRequest, Emission
from decode_node.speculative.step import LaunchedRound, SpeculativeStep
from decode_node.speculative.width_policy import WidthPolicy


@dataclass(frozen=True, slots=True)
class LaunchedWidth:
    """A round, whose outcome the policy sees."""

    launched: LaunchedRound
    policy: WidthPolicy
    width: int

    @property
    def completion(self) -> Completion:
        return self.launched.completion

    @property
    def requests(self) -> Sequence[DecodeRequest]:
        return self.launched.requests

    def read(self) -> list[Emission]:
        emissions, seconds = self.launched.read_timed()
        # what is drafted behind the end of a text says nothing of texts
        accepted = [len(emission.tokens) - 1 for emission in emissions if not emission.request.ended]
        self.policy.observe(len(emissions), self.width, accepted, seconds)
        return emissions


class AdaptiveStep:
    """A `DecodeStep` of several: one for each width. All have the pages that the widest needs."""

    def __init__(
        self,
        steps: Mapping[int, SpeculativeStep],
        policy: WidthPolicy,
        phase_seconds: Mapping[str, float],
    ) -> None:
        """`phase_seconds`: what all `steps` add to."""
        self._steps = dict(steps)
        self.phase_seconds = phase_seconds
        self._policy = policy
        widest = self._steps[max(self._steps)]
        self.tokens_per_step = widest.tokens_per_step
        self.slack = widest.slack
        self.needs_results = widest.needs_results

    @property
    def graphs(self) -> list[NodeGraphs[Any]]:
        """Of all widths, the widest first."""
        return [graph for width in sorted(self._steps, reverse=True) for graph in self._steps[width].graphs]

    def launch(self, requests: Sequence[DecodeRequest]) -> LaunchedWidth:
        width = self._policy.choose(len(requests))
        return LaunchedWidth(self._steps[width].launch(requests), self._policy, width)
