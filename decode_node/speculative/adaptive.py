"""How many drafts in a row: chosen before every round by the size of the batch and by what was accepted lately.

A batch of few requests leaves the device waiting for memory, so that verifying more tokens costs next to nothing; a
large one pays for each. So there are slots of batch sizes, each with the widths (drafts per request) that may pay
there, and in a slot the width follows the mean number of accepted drafts. Each width is a step of its own, with its own
graphs, over the same relay rows and pools: a chain's state between rounds does not depend on how many drafts come next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from common.engine.cuda_graph.node_graphs import NodeGraphs
from common.engine.overlap import Completion
from decode_node.request import DecodeRequest, Emission
from decode_node.speculative.step import SpeculativeStep
from decode_node.step import LaunchedStep

SMOOTHING = 0.2  # weight of the latest round in the mean
WARM_UP = 10  # rounds of a width before it is judged
EVERY = 5  # rounds between two judgements
PROBE_AFTER = 50  # rounds without drafts until the smallest width is tried again
MARGIN = 0.5  # a width pays if more than all but half of its last draft is accepted
RELUCTANCE = 0.25  # less than that, before a small batch gets a smaller width: its drafts are almost free
SLOTS = ((1, (1, 3, 5, 7)), (8, (0, 1, 3)), (32, (0, 1)), (64, (0,)))  # (smallest batch, widths)


@dataclass(slots=True)
class Slot:
    """Batches of `smallest` and more requests, up to the next slot."""

    smallest: int
    widths: tuple[int, ...]  # ascending
    reluctance: float
    width: int  # of now
    mean: float  # accepted drafts per request and round, smoothed
    rounds: int = 0  # at this width

    def observe(self, accepted: float) -> None:
        """A round of this width has accepted so many drafts per request."""
        self.rounds += 1
        if self.width == 0:
            if self.rounds >= PROBE_AFTER and len(self.widths) > 1:
                self._switch(self.widths[1], self.widths[1] - 1)
            return
        self.mean += SMOOTHING * (accepted - self.mean)
        if self.rounds >= WARM_UP and self.rounds % EVERY == 0:
            wanted = self._judge()
            if wanted != self.width:
                self._switch(wanted, self.mean)

    def _judge(self) -> int:
        widths, index = self.widths, self.widths.index(self.width)
        while index > 0 and self.mean <= self._least(widths[index - 1]):
            index -= 1
        if widths[index] == self.width:
            while index + 1 < len(widths) and self.mean > widths[index] - MARGIN:
                index += 1
        return widths[index]

    def _least(self, smaller: int) -> float:
        """What has to be accepted for more drafts than `smaller` to pay."""
        return MARGIN if smaller == 0 else smaller - MARGIN - self.reluctance

    def _switch(self, width: int, mean: float) -> None:
        self.width, self.mean, self.rounds = width, mean, 0


def slots_up_to(steps: int) -> list[Slot]:
    """The widths that do not exceed `steps`; the smallest batches may have all of them."""
    slots = []
    for smallest, widths in SLOTS:
        most = (steps,) if smallest == 1 else ()
        usable = tuple(sorted({*(width for width in widths if width <= steps), *most}))
        slots.append(
            Slot(smallest, usable, RELUCTANCE if smallest == 1 else 0.0, usable[-1], float(usable[-1]))
        )
    return slots


def batches_of(slots: Sequence[Slot], max_running: int) -> dict[int, tuple[int, int]]:
    """Width -> the smallest and the largest batch that it may serve: what has to be captured for it."""
    ends = [*(slot.smallest - 1 for slot in slots[1:]), max_running]
    found: dict[int, tuple[int, int]] = {}
    for slot, end in zip(slots, ends, strict=True):
        if slot.smallest <= max_running:
            for width in slot.widths:
                smallest, _ = found.get(width, (slot.smallest, 0))
                found[width] = smallest, min(end, max_running)
    return found


class WidthPolicy:
    """Counts and decides; knows nothing of a device."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        self._slots = tuple(slots)

    def choose(self, batch: int) -> int:
        """Drafts in a row for a batch of so many requests."""
        return self._slot(batch).width

    def observe(self, batch: int, width: int, accepted: float) -> None:
        """A round of `batch` requests was read. One that was launched before a change of width says nothing."""
        slot = self._slot(batch)
        if slot.width == width:
            slot.observe(accepted)

    def _slot(self, batch: int) -> Slot:
        return next(slot for slot in reversed(self._slots) if slot.smallest <= max(batch, 1))


@dataclass(frozen=True, slots=True)
class LaunchedWidth:
    """A round, whose outcome the policy sees."""

    launched: LaunchedStep
    policy: WidthPolicy
    width: int

    @property
    def completion(self) -> Completion:
        return self.launched.completion

    @property
    def requests(self) -> Sequence[DecodeRequest]:
        return self.launched.requests

    def read(self) -> list[Emission]:
        emissions = self.launched.read()
        accepted = sum(len(emission.tokens) - 1 for emission in emissions) / len(emissions)
        self.policy.observe(len(emissions), self.width, accepted)
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
