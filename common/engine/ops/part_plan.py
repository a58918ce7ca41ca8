"""Divides the keys of a batch among the programs of attention by the requests' lengths, which only the device knows.

If each request had as many parts as every other one, the parts of a long request would be long, and a step would take
as long as the longest. So parts have one size for all requests, and a request has as many as its keys need. The
grid of a graph has a place for a fixed number of parts: some of them stay empty.
"""

from __future__ import annotations

import torch
from torch import Tensor

from common.engine.ops.triton_kernel import (
    await_previous,
    cdiv,
    chained,
    kernel,
    kernel_with_varying,
    next_power_of_2,
    tl,
)

GRANULE = 16  # parts are multiples of this many keys
# Places besides those of an equal division. Each request may have one part that is shorter than the others; with fewer
# places than that, parts become longer until all have a place.
MAX_SPARE = 48
WARP_REQUESTS = 512  # per warp, whose registers do not suffice for more
FIELDS = 4  # of a place: request, number of the part in it, length of the request, granules of a part


def places_of(requests: int, splits: int, max_keys: int, least: int) -> int:
    """Return the number of places for the parts of a batch whose requests have `splits` each if they are alike.

    Args:
        max_keys: upper bound of a request's keys.
        least: keys of a part, at least.
    """
    return min(requests * splits + min(requests - 1, MAX_SPARE), requests * max(cdiv(max_keys, least), 1))


def places_in(plan: Tensor, requests: int) -> int:
    """Return the number of places of a plan for this many requests."""
    return (plan.shape[0] - requests - 1) // FIELDS


@kernel_with_varying("requests", "splits", "places", "kept_out", "window")
def _plan_kernel(  # type: ignore[no-untyped-def]
    lens_ptr,  # [requests]
    plan_ptr,  # see `plan_parts`
    requests,
    splits,
    places,
    kept_out,
    window,
    LEAST: tl.constexpr,  # granules of a part, at least
    GRANULE: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK: tl.constexpr,  # at least `requests`
    FIELDS: tl.constexpr,
    CHAINED: tl.constexpr,
):
    await_previous(CHAINED)
    request = tl.arange(0, BLOCK)
    live = request < requests
    length = tl.load(lens_ptr + request, mask=live, other=0)
    keys = tl.maximum(length - kept_out, 0)
    if WINDOW:
        keys = tl.minimum(keys, window)
    granules = tl.cdiv(keys, GRANULE)
    # The smallest size that leaves a place for each part. The first one tried is that of an equal division.
    low = tl.maximum(tl.cdiv(tl.sum(granules, axis=0), requests * splits), LEAST)
    high = tl.maximum(tl.max(granules, axis=0), low)
    size = low
    while low < high:
        needed = tl.sum(tl.where(live, tl.maximum(tl.cdiv(granules, size), 1), 0), axis=0)
        if needed <= places:
            high = size
        else:
            low = size + 1
        size = (low + high) // 2
    count = tl.where(live, tl.maximum(tl.cdiv(granules, size), 1), 0)
    end = tl.cumsum(count, axis=0)
    first = end - count
    for part in range(tl.max(count, axis=0)):
        there = part < count
        place = plan_ptr + (first + part) * FIELDS
        tl.store(place, request, mask=there)
        tl.store(place + 1, tl.full((BLOCK,), part, tl.int32), mask=there)
        tl.store(place + 2, length, mask=there)
        tl.store(place + 3, tl.full((BLOCK,), size, tl.int32), mask=there)
    # An empty place is the second part of a request without keys.
    for start in range(tl.sum(count, axis=0), places, BLOCK):
        empty = start + request < places
        place = plan_ptr + (start + request) * FIELDS
        tl.store(place, tl.zeros((BLOCK,), tl.int32), mask=empty)
        tl.store(place + 1, tl.full((BLOCK,), 1, tl.int32), mask=empty)
        tl.store(place + 2, tl.zeros((BLOCK,), tl.int32), mask=empty)
        tl.store(place + 3, tl.full((BLOCK,), 1, tl.int32), mask=empty)
    firsts = plan_ptr + places * FIELDS
    tl.store(firsts, 0)
    tl.store(firsts + 1 + request, end, mask=live)


def plan_parts(
    seq_lens: Tensor, splits: int, places: int, least: int, kept_out: int = 0, window: int | None = None
) -> Tensor:
    """Divide the last `window` of each request's first seq_lens[b] - kept_out keys into parts.

    Args:
        seq_lens: [B] int32.
        splits: parts of each request if all are alike.
        places: the maximum number of parts, at least B.
        least: keys of a part, at least; a multiple of GRANULE.

    Returns [places * FIELDS + B + 1] int32: FIELDS for each place, then the place of each request's first part, and
    the number of parts. A request without keys has one part.
    """
    requests = seq_lens.shape[0]
    assert requests <= places, f"{places} places for {requests} requests"
    assert least % GRANULE == 0, f"parts of {least} keys are no multiples of {GRANULE}"
    block = next_power_of_2(requests)
    plan = torch.empty(places * FIELDS + requests + 1, dtype=torch.int32, device=seq_lens.device)
    _plan_kernel[(1,)](
        seq_lens,
        plan,
        requests,
        splits,
        places,
        kept_out,
        window or 0,
        LEAST=least // GRANULE,
        GRANULE=GRANULE,
        WINDOW=window is not None,
        BLOCK=block,
        FIELDS=FIELDS,
        num_warps=max(block // WARP_REQUESTS, 1),
        **chained(seq_lens.device),
    )
    return plan


@kernel
def part_at(  # type: ignore[no-untyped-def]
    plan_ptr, lens_ptr, place, splits, PLANNED: tl.constexpr, FIELDS: tl.constexpr
):
    """Return what is computed at a place: request, number of the part, length of the request, granules of a part.

    Without a plan all requests have `splits` parts, and the granules are 0: `keys_of_part` divides the keys.
    """
    if PLANNED:
        entry = plan_ptr + place * FIELDS
        request, split = tl.load(entry).to(tl.int64), tl.load(entry + 1)
        length, granules = tl.load(entry + 2), tl.load(entry + 3)
    else:
        request, split = (place // splits).to(tl.int64), place % splits
        length, granules = tl.load(lens_ptr + request), 0
    return request, split, length, granules
