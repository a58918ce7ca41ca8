"""Learns how long the pages of a prompt take from one node to another, pair by pair."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

SMOOTHING = 0.1  # weight of one transfer in the moving averages
LONGEST = 60.0  # seconds; longer ones count as this, or one pair would spoil the average of all
MAX_PAIRS = 4096  # that are remembered; beyond it the one that was measured least recently is forgotten


@dataclass(slots=True)
class _Rate:
    """Moving averages over the transfers of one pair, or of all."""

    ms: float = 0.0
    tokens: float = 0.0

    def add(self, ms: float, tokens: int) -> None:
        share = SMOOTHING if self.tokens else 1.0
        self.ms += share * (ms - self.ms)
        self.tokens += share * (tokens - self.tokens)

    @property
    def per_token(self) -> float:
        """Milliseconds; 0 before the first measurement."""
        return self.ms / self.tokens if self.tokens else 0.0


class MeasuredTransfers:
    """The measured times. A pair without measurements is taken for an average one."""

    def __init__(self) -> None:
        self._pairs: OrderedDict[tuple[str, str], _Rate] = OrderedDict()  # (prefill, decode) incarnations
        self._all = _Rate()

    def measured(self, prefill: str, decode: str, seconds: float, tokens: int) -> None:
        """Record that the pages of `tokens` tokens arrived `seconds` after they were computed and had room."""
        if tokens <= 0 or seconds < 0:
            return
        rate = self._pairs.setdefault((prefill, decode), _Rate())
        self._pairs.move_to_end((prefill, decode))
        for each in (rate, self._all):
            each.add(1000 * min(seconds, LONGEST), tokens)
        if len(self._pairs) > MAX_PAIRS:
            self._pairs.popitem(last=False)

    def ms(self, prefill: str, decode: str, tokens: int) -> float:
        """Return the predicted milliseconds for the pages of `tokens` tokens; 0 while nothing was measured."""
        return tokens * self._pairs.get((prefill, decode), self._all).per_token

    def forget(self, incarnation: str) -> None:
        """Forget a node that is lost."""
        for pair in [pair for pair in self._pairs if incarnation in pair]:
            del self._pairs[pair]
