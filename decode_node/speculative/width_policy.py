"""How many drafts in a row give the most tokens per second: by what rounds took and by what was accepted.

A round of `w` drafts emits 1 + (chance that the first is right) + (that the first two are) + ... tokens per request.
Verifying more costs next to nothing where the device waits for memory, and pays for each where it does not; where that
begins depends on the model, the device and the context, so rounds are timed instead of guessed: spec/speculation.md 3.9
has a batch size at which drafts end, here they end where they are seen to cost more than they bring.

Pure: counts and decides, knows nothing of a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

SMOOTHING = 0.2  # weight of the latest round in the time of a width
MEMORY = 100  # drafts of a place that its chance is the mean of
KINSHIP = 2  # drafts that the place before is worth
FORGETTING = 0.98  # of what is known of a place that a round does not try
EVERY = 5  # rounds of a batch size between two decisions
TRIALS = 3  # rounds of a width before it can be judged
REFRESH = 50  # rounds of a batch size after which the width that was not seen for longest has one
MARGIN = 0.02  # more tokens per second that a change must promise
SLOTS = ((1, (1, 3, 5, 7)), (8, (0, 1, 3, 5)), (32, (0, 1, 3)))  # (smallest batch, widths that may pay)


@dataclass(frozen=True, slots=True)
class Slot:
    """Batches of `smallest` and more requests, up to the next slot."""

    smallest: int
    widths: tuple[int, ...]  # ascending


def slots_up_to(steps: int) -> list[Slot]:
    """The widths that do not exceed `steps`; the smallest batches may have all of them."""
    slots = []
    for smallest, widths in SLOTS:
        most = steps if smallest == 1 else min(steps, widths[-1])
        slots.append(Slot(smallest, tuple(sorted({*(width for width in widths if width < most), most}))))
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


class Acceptance:
    """How often the draft at each place is right when all before it are; of batches of any size.

    What is not known of a place is taken from the one before it: at first, and again when it has not been tried for a
    while. Nothing is before the first one: what was never tried is worth trying.
    """

    def __init__(self, widest: int) -> None:
        self._right = [0.0] * widest
        self._seen = [0.0] * widest  # drafts, up to MEMORY

    def observe(self, width: int, accepted: Sequence[int]) -> None:
        """`accepted` of `width` drafts, for each request of a round."""
        for place, seen in enumerate(self._seen):
            reached = sum(count >= place for count in accepted) if place < width else 0
            if reached:
                share = sum(count > place for count in accepted) / reached
                self._right[place] += reached / (seen + reached) * (share - self._right[place])
                self._seen[place] = min(seen + reached, MEMORY)
            elif place >= width:
                self._seen[place] = seen * FORGETTING

    def tokens(self, width: int) -> float:
        """Expected per request of a round of `width` drafts; the one behind the last right draft counts."""
        total = right = chance = 1.0
        for seen, own in zip(self._seen[:width], self._right[:width]):
            right = (seen * own + KINSHIP * right) / (seen + KINSHIP)
            chance *= right
            total += chance
        return total


@dataclass(slots=True)
class _Cost:
    """Of rounds of one width, in batches of about one size."""

    rounds: int = 0
    seconds: float = 0.0
    seen: int = 0  # number of the latest round, of any width

    def observe(self, seconds: float, number: int) -> None:
        self.rounds += 1
        self.seen = number
        seconds = max(seconds, 1e-9)  # what no clock can see
        if self.rounds <= TRIALS:  # the first ones warm caches up
            self.seconds = seconds if self.rounds == 1 else min(self.seconds, seconds)
        else:  # one that was held up by something else counts as twice as long, not as a hundred times
            self.seconds += SMOOTHING * (min(seconds, 2 * self.seconds) - self.seconds)


class _Size:
    """Batches of one power of two and up to the next."""

    def __init__(self, widths: Sequence[int]) -> None:
        self.width = widths[-1]  # of the next round
        self._best = self.width  # as far as is known
        self._costs = {width: _Cost() for width in widths}
        self._rounds = 0
        self._refreshed = 0

    def observe(self, width: int, seconds: float, acceptance: Acceptance) -> None:
        self._rounds += 1
        self._costs[width].observe(seconds, self._rounds)
        if width != self.width:
            return  # launched before the last change
        untried = [each for each, cost in self._costs.items() if cost.rounds < TRIALS]
        if untried:
            self.width = max(untried)
        elif self._rounds - self._refreshed >= REFRESH:
            self._refreshed = self._rounds
            self.width = min(self._costs, key=lambda each: self._costs[each].seen)
        elif width != self._best or self._rounds % EVERY == 0:
            self._judge(acceptance)

    def _judge(self, acceptance: Acceptance) -> None:
        rates = {width: acceptance.tokens(width) / cost.seconds for width, cost in self._costs.items()}
        best = max(rates, key=lambda width: rates[width])
        if rates[best] > (1 + MARGIN) * rates[self._best]:
            self._best = best
        self.width = self._best


class WidthPolicy:
    """Chooses before every round by the size of the batch."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        self._slots = tuple(slots)
        self._acceptance = Acceptance(max(width for slot in slots for width in slot.widths))
        self._sizes: dict[int, _Size] = {}  # by the bits of a batch size

    def choose(self, batch: int) -> int:
        """Drafts in a row for a batch of so many requests."""
        return self._size(batch).width

    def observe(self, batch: int, width: int, accepted: Sequence[int], seconds: float) -> None:
        """A round of `batch` requests took so long, and so many drafts of each request were right.

        `accepted` may leave out requests whose drafts say nothing.
        """
        self._acceptance.observe(width, accepted)
        self._size(batch).observe(width, seconds, self._acceptance)

    def _size(self, batch: int) -> _Size:
        bits = max(batch, 1).bit_length()
        if bits not in self._sizes:
            smallest = 1 << (bits - 1)
            slot = next(slot for slot in reversed(self._slots) if slot.smallest <= smallest)
            self._sizes[bits] = _Size(slot.widths)
        return self._sizes[bits]
