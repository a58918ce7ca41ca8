"""Chunked prefill as pure functions: which prompt is next, and whose tokens are part of the next forward."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from common.node.ageing import aged, promoted
from common.node.announced_work import Work
from prefill_node.arrivals import RecentArrivals
from prefill_node.cost_curve import CostCurve
from prefill_node.packing import Waiting, share
from prefill_node.request import PrefillRequest


@dataclass(frozen=True, slots=True)
class Chunk:
    """The tokens start .. start+length of one prompt."""

    request: PrefillRequest
    start: int
    length: int

    @property
    def final(self) -> bool:
        return self.start + self.length == self.request.num_tokens


# Seconds between two chunks of a prompt: decode nodes treat a transfer without progress as lost.
MAX_PAUSE = 1.0
IMAGE_WEIGHT = 8  # encoding one image token takes as long as computing up to this many text tokens


def chunk_work(chunks: Sequence[Chunk]) -> Work:
    """Return the amount of work of one forward over these chunks. An image is encoded whole with its first rows."""
    tokens = contexts = images = 0
    for chunk in chunks:
        end = chunk.start + chunk.length
        tokens += chunk.length
        contexts += chunk.length * end
        for image in chunk.request.images:
            first, last = image.overlap(chunk.start, end)
            images += image.length if first < last else 0
    return Work.of(tokens, contexts, IMAGE_WEIGHT * images)


def cost(request: PrefillRequest, now: float) -> float:
    """Return the scheduling cost, lowest first: the shortest remaining prompt, with ageing (see `aged`)."""
    return aged(request.remaining, now - request.queued)


def in_order(requests: Iterable[PrefillRequest], now: float) -> Iterator[PrefillRequest]:
    """Yield prompts that have paused for MAX_PAUSE, longest pause first, then the others.

    Those are ordered by priority (see `promoted`), and within one priority by cost. Ties keep the order of `requests`.
    Takes O(n), plus O(log n) for each prompt that is read.
    """
    given = list(requests)
    if len(given) < 2:
        yield from given
        return
    most_urgent = min((request.priority for request in given), default=0)
    heap = [(*_rank(request, now, most_urgent), index, request) for index, request in enumerate(given)]
    heapq.heapify(heap)
    while heap:
        yield heapq.heappop(heap)[4]


def _rank(request: PrefillRequest, now: float, most_urgent: int) -> tuple[bool, int, float]:
    """Return a sort key. A prompt of which nothing was launched cannot pause."""
    if now - request.launched_at >= MAX_PAUSE:
        return False, 0, request.launched_at
    return True, promoted(request.priority, now - request.queued, most_urgent), cost(request, now)


def fewest_keys_first(chunks: Iterable[Chunk]) -> list[Chunk]:
    """Return the chunks of a forward by the keys that each of their tokens sees on average.

    Attention begins with the tokens of the last chunk, and whatever takes longest must begin first: begun last, it
    would end after all others (longest processing time first; Graham, 1969).
    """
    return sorted(chunks, key=lambda chunk: chunk.start + chunk.length // 2)


def plan_chunks(
    computing: Iterable[PrefillRequest],
    now: float,
    curve: CostCurve,
    max_batch: int,
    grid: int = 1,
    arrivals: RecentArrivals | None = None,
    waiting: int = 0,
) -> list[Chunk]:
    """Return the next forward: the first prompts in order, as many as `share` says; only the last one is cut.

    Prompts whose tokens are all launched are skipped, and those whose prefix is being compared. The first remaining
    prompt always advances.

    Args:
        curve: the times of forwards; its largest size bounds this one.
        grid: prompts are cut only at multiples of it; the largest size is one.
        arrivals: by them it is decided whether a long prompt is cut; None: as if one shorter prompt arrived during its
            forwards.
        waiting: prompts that wait, too, but are not in `computing`.
    """
    unfinished = [each for each in computing if each.remaining and not each.ended]
    queue = list(itertools.islice(in_order(unfinished, now), max_batch))
    lengths = [Waiting(request.scheduled, request.remaining) for request in queue]
    passing = arrivals.shorter_per_ms(queue[0].remaining, now) if arrivals is not None and queue else None
    shared = share(lengths, curve, len(unfinished) - len(queue) + waiting, passing)
    chunks = [Chunk(each, each.scheduled, each.remaining) for each in queue[: shared.whole]]
    if shared.part:
        cut = queue[shared.whole]
        length = shared.part - (cut.scheduled + shared.part) % grid
        if length > 0:
            chunks.append(Chunk(cut, cut.scheduled, length))
    return chunks
