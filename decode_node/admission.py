"""Policies of admission and retraction: pure functions that choose the requests that get, keep or lose pages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from common.node.ageing import aged, promoted
from decode_node.request import DecodeRequest


def headroom_pages(active: Iterable[DecodeRequest], reserved_tokens: int, page_size: int) -> int:
    """Return the pages to keep free so that active requests can continue: reserved_tokens for each, or what is left.

    The host knows lengths exactly, so one reserve per request is enough.
    """
    return sum(-(-min(reserved_tokens, request.remaining()) // page_size) for request in active)


def in_order(waiting: Iterable[DecodeRequest], now: float) -> list[DecodeRequest]:
    """Sort by priority (see `promoted`), then by shortest prompt with ageing (see `aged`).

    Prefill nodes compute the same prompts in this order.
    """
    requests = list(waiting)
    most_urgent = min((request.priority for request in requests), default=0)

    def rank(request: DecodeRequest) -> tuple[int, float]:
        waited = now - request.queued
        return promoted(request.priority, waited, most_urgent), aged(len(request.prompt), waited)

    return sorted(requests, key=rank)


def admit(
    waiting: Sequence[DecodeRequest],
    slots: int,
    max_skips: int,
    try_admit: Callable[[DecodeRequest], bool],
) -> list[DecodeRequest]:
    """Admit in the order of `waiting`; a request that does not fit may be passed by later ones `max_skips` times.

    `try_admit` takes the pages, or returns False and takes nothing. It fails at most max_skips + 1 times per call,
    however long the queue is. Returns the admitted requests.
    """
    admitted: list[DecodeRequest] = []
    passed: list[DecodeRequest] = []
    for request in waiting:
        if len(admitted) >= slots or len(passed) > max_skips:
            break
        if try_admit(request):
            admitted.append(request)
            for earlier in passed:
                earlier.skipped += 1
        else:
            passed.append(request)
        if any(earlier.skipped >= max_skips for earlier in passed):
            break
    return admitted


def choose_victim(running: Iterable[DecodeRequest]) -> DecodeRequest | None:
    """Return the least urgent request with the least progress: fewest tokens drawn, then longest prompt."""
    candidates = [request for request in running if not request.retract and not request.ended]
    return min(candidates, key=lambda r: (-r.priority, r.launched, -len(r.prompt)), default=None)
