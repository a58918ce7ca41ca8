"""Predicts and measures the times of a node's forwards: the scheduler decides by them, and operators compare them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from prefill_node.cost_curve import CostCurve
from prefill_node.queues import Queues
from prefill_node.scheduler import Chunk

# Prompt lengths whose times the router is told.
REPORTED = (1, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 32_768)


class _Running(NamedTuple):
    """A forward whose results have not been read."""

    tokens: int
    contexts: int  # tokens of earlier forwards that its tokens attend to, summed up
    images: bool
    predicted: float  # milliseconds


class ForwardTimes:
    """Predicts by a cost curve, which learns from what forwards took if the node measured one at its start."""

    def __init__(self, curve: CostCurve, learns: bool = False) -> None:
        self.curve = curve
        self.learns = learns
        self._begun: deque[_Running] = deque()
        self._prompt_times: tuple[tuple[int, float], ...] | None = None  # None: the curve has changed since
        self.measured_seconds = self.predicted_seconds = 0.0  # over all forwards whose time was measured

    def begin(self, chunks: Sequence[Chunk]) -> None:
        """Record that a forward over these chunks is launched."""
        tokens, contexts, images = 0, 0, False
        for chunk in chunks:
            tokens += chunk.length
            contexts += chunk.start * chunk.length
            images = images or bool(chunk.request.images)
        predicted = self.curve.ms(tokens, contexts) if tokens else 0.0
        self._begun.append(_Running(tokens, contexts, images, predicted))

    @property
    def latest_seconds(self) -> float:
        """Return what is predicted for the latest forward."""
        return self._begun[-1].predicted / 1e3

    def end(self, ms: float | None) -> None:
        """Record what the oldest forward took; None if that was not measured.

        A forward that may have encoded images says nothing about its tokens.
        """
        begun = self._begun.popleft()
        if ms is None or begun.images or not begun.tokens:
            return
        self.measured_seconds += ms / 1e3
        self.predicted_seconds += begun.predicted / 1e3
        if self.learns:
            self.curve.learn(begun.tokens, begun.contexts, ms)
            self._prompt_times = None

    def queued_ms(self, queues: Queues) -> float:
        """Return the milliseconds of all forwards that the node's prompts need, those in flight included.

        Waiting prompts count at the rate of large forwards, because they share forwards or are cut.
        """
        curve = self.curve
        waiting = queues.waiting_tokens * curve.ms(curve.step) / curve.step
        computing = sum(
            curve.prompt_ms(each.remaining, each.scheduled)
            for each in queues.computing.values()
            if each.remaining
        )
        return waiting + computing + sum(each.predicted for each in self._begun)

    def prompt_times(self) -> tuple[tuple[int, float], ...]:
        """Return (tokens, milliseconds) of whole prompts of some lengths, for the router.

        The node asks in every turn, so they are computed only after a change of the curve.
        """
        if self._prompt_times is None:
            self._prompt_times = tuple(
                [(tokens, round(self.curve.prompt_ms(tokens), 3)) for tokens in REPORTED]
            )
        return self._prompt_times
