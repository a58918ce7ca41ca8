"""Learns how long the pages of a prompt take from one node to another, pair by pair."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

SMOOTHING = 0.1  # weight of one transfer in the moving averages
MAX_SECONDS = 60.0  # seconds; longer ones count as this, or one pair would spoil the average of all
MAX_PAIRS = 4096  # that are remembered; beyond it the one that was measured least recently is forgotten
NO_RATES: Mapping[str, float] = {}


@dataclass(slots=True)
class _Rate:
    """Moving averages over the transfers of one pair, or of all."""

    ms: float = 0.0
    tokens: float = 0.0

    def add(self, ms: float, tokens: int) -> float:
        """Return the milliseconds per token with one more transfer."""
        share = SMOOTHING if self.tokens else 1.0
        self.ms += share * (ms - self.ms)
        self.tokens += share * (tokens - self.tokens)
        return self.ms / self.tokens


class MeasuredTransfers:
    """The measured times. A pair without measurements is taken for an average one.

    Attributes:
        average: milliseconds per token of all pairs; 0 while nothing was measured.
    """

    def __init__(self) -> None:
        self._pairs: OrderedDict[tuple[str, str], _Rate] = OrderedDict()  # (prefill, decode) incarnations
        self._all = _Rate()
        self.average = 0.0
        self._rates: dict[str, dict[str, float]] = {}  # prefill -> decode -> milliseconds per token

    def measured(self, prefill: str, decode: str, seconds: float, tokens: int) -> None:
        """Record that the pages of `tokens` tokens arrived `seconds` after they were computed and had room."""
        if tokens <= 0 or seconds < 0:
            return
        ms = 1000 * min(seconds, MAX_SECONDS)
        rate = self._pairs.setdefault((prefill, decode), _Rate())
        self._pairs.move_to_end((prefill, decode))
        self._rates.setdefault(prefill, {})[decode] = rate.add(ms, tokens)
        self.average = self._all.add(ms, tokens)
        if len(self._pairs) > MAX_PAIRS:
            self._forget(next(iter(self._pairs)))

    def rates(self, prefill: str) -> Mapping[str, float]:
        """Return the milliseconds per token from a prefill node, by decode node, as far as they were measured."""
        return self._rates.get(prefill, NO_RATES)

    def ms(self, prefill: str, decode: str, tokens: int) -> float:
        """Return the predicted milliseconds for the pages of `tokens` tokens; 0 while nothing was measured."""
        return tokens * self.rates(prefill).get(decode, self.average)

    def forget(self, incarnation: str) -> None:
        """Forget a node that is lost."""
        for pair in [pair for pair in self._pairs if incarnation in pair]:
            self._forget(pair)

    def _forget(self, pair: tuple[str, str]) -> None:
        prefill, decode = pair
        del self._pairs[pair], self._rates[prefill][decode]
        if not self._rates[prefill]:
            del self._rates[prefill]
