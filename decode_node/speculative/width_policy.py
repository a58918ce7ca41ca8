"""Chooses the number of drafts per round that maximizes tokens per second, from measured times and acceptance.

A round of `w` drafts emits 1 + P(first is accepted) + P(first two are accepted) + ... tokens per request. Verifying
more drafts is almost free while the device is limited by memory, and has a price once it is not. Where that starts
depends on the model, the device and the context, so rounds are timed, and drafting stops where it is measured to cost
more than it gains.

The policy is pure: it counts and decides, and knows nothing of a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

SMOOTHING = 0.2  # weight of the latest round in the moving average of a width's time
WINDOW = 100  # drafts over which the acceptance of a position is averaged
PRIOR_WEIGHT = 2  # weight of the previous position's acceptance, in drafts
DECAY = 0.98  # decay of the weight of a position that a round does not try
DECISION_ROUNDS = 5  # rounds of a batch size between two decisions
TRIAL_ROUNDS = 3  # rounds of a width before it can be judged
REFRESH_ROUNDS = 50  # rounds of a batch size after which the least recently measured width gets a round
MARGIN = 0.02  # required gain in tokens per second for a change
BATCH_CLASSES = ((1, (1, 3, 5, 7)), (8, (0, 1, 3, 5)), (32, (0, 1, 3)))  # (smallest batch, candidate widths)


@dataclass(frozen=True, slots=True)
class BatchClass:
    """Batches of at least `smallest` requests, up to the next class."""

    smallest: int
    widths: tuple[int, ...]  # ascending


def classes_up_to(steps: int) -> list[BatchClass]:
    """Limit the widths to `steps`. The smallest batches may use all of them."""
    classes = []
    for smallest, widths in BATCH_CLASSES:
        most = steps if smallest == 1 else min(steps, widths[-1])
        classes.append(
            BatchClass(smallest, tuple(sorted({*(width for width in widths if width < most), most})))
        )
    return classes


def batches_of(classes: Sequence[BatchClass], max_running: int) -> dict[int, tuple[int, int]]:
    """Map each width to the smallest and largest batch that it may serve, which must be captured."""
    ends = [*(each.smallest - 1 for each in classes[1:]), max_running]
    found: dict[int, tuple[int, int]] = {}
    for each, end in zip(classes, ends, strict=True):
        if each.smallest <= max_running:
            for width in each.widths:
                smallest, _ = found.get(width, (each.smallest, 0))
                found[width] = smallest, min(end, max_running)
    return found


class Acceptance:
    """Acceptance of the draft at each position, given that all previous drafts were accepted; over all batch sizes.

    What is unknown about a position is estimated from the previous one: initially, and again when it was not tried for
    a while. The first position starts at 1, so untried positions are tried.
    """

    def __init__(self, widest: int) -> None:
        self._rates = [0.0] * widest
        self._weights = [0.0] * widest  # in drafts, at most WINDOW

    def observe(self, width: int, accepted: Sequence[int]) -> None:
        """Record the number of accepted drafts, of `width`, for each request of a round."""
        for place, seen in enumerate(self._weights):
            reached = sum(count >= place for count in accepted) if place < width else 0
            if reached:
                share = sum(count > place for count in accepted) / reached
                self._rates[place] += reached / (seen + reached) * (share - self._rates[place])
                self._weights[place] = min(seen + reached, WINDOW)
            elif place >= width:
                self._weights[place] = seen * DECAY

    def tokens(self, width: int) -> float:
        """Return the expected tokens per request of a round of `width` drafts, including the target's own token."""
        total = rate = chance = 1.0
        for seen, own in zip(self._weights[:width], self._rates[:width]):
            rate = (seen * own + PRIOR_WEIGHT * rate) / (seen + PRIOR_WEIGHT)
            chance *= rate
            total += chance
        return total


@dataclass(slots=True)
class _Cost:
    """Measured time of rounds of one width, for batches of similar size."""

    rounds: int = 0
    seconds: float = 0.0
    seen: int = 0  # number of the latest round, counted over all widths

    def observe(self, seconds: float, number: int) -> None:
        self.rounds += 1
        self.seen = number
        seconds = max(seconds, 1e-9)  # below the clock's resolution
        if self.rounds <= TRIAL_ROUNDS:  # the first rounds warm up caches
            self.seconds = seconds if self.rounds == 1 else min(self.seconds, seconds)
        else:  # an outlier counts as at most twice the average
            self.seconds += SMOOTHING * (min(seconds, 2 * self.seconds) - self.seconds)


class _Size:
    """Widths for batch sizes from one power of two up to the next."""

    def __init__(self, widths: Sequence[int]) -> None:
        self.width = widths[-1]  # the next round's
        self._best = self.width  # best known width
        self._costs = {width: _Cost() for width in widths}
        self._rounds = 0
        self._refreshed = 0

    def observe(self, width: int, seconds: float, acceptance: Acceptance) -> None:
        self._rounds += 1
        self._costs[width].observe(seconds, self._rounds)
        if width != self.width:
            return  # this round was launched before the last change
        untried = [each for each, cost in self._costs.items() if cost.rounds < TRIAL_ROUNDS]
        if untried:
            self.width = max(untried)
        elif self._rounds - self._refreshed >= REFRESH_ROUNDS:
            self._refreshed = self._rounds
            self.width = min(self._costs, key=lambda each: self._costs[each].seen)
        elif width != self._best or self._rounds % DECISION_ROUNDS == 0:
            self._judge(acceptance)

    def _judge(self, acceptance: Acceptance) -> None:
        rates = {width: acceptance.tokens(width) / cost.seconds for width, cost in self._costs.items()}
        best = max(rates, key=lambda width: rates[width])
        if rates[best] > (1 + MARGIN) * rates[self._best]:
            self._best = best
        self.width = self._best


class WidthPolicy:
    """Chooses the width of every round by the size of its batch."""

    def __init__(self, classes: Sequence[BatchClass]) -> None:
        self._classes = tuple(classes)
        self._acceptance = Acceptance(max(width for each in classes for width in each.widths))
        self._sizes: dict[int, _Size] = {}  # bit length of the batch size -> its statistics

    def choose(self, batch: int) -> int:
        """Return the number of drafts for a batch of `batch` requests."""
        return self._size(batch).width

    def observe(self, batch: int, width: int, accepted: Sequence[int], seconds: float) -> None:
        """Record a round of `batch` requests: its time, and the number of accepted drafts of each request.

        `accepted` may omit requests whose drafts say nothing.
        """
        self._acceptance.observe(width, accepted)
        self._size(batch).observe(width, seconds, self._acceptance)

    def _size(self, batch: int) -> _Size:
        bits = max(batch, 1).bit_length()
        if bits not in self._sizes:
            smallest = 1 << (bits - 1)
            each = next(each for each in reversed(self._classes) if each.smallest <= smallest)
            self._sizes[bits] = _Size(each.widths)
        return self._sizes[bits]
