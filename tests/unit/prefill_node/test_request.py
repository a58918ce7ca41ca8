"""What one prompt may reuse, which of its pages are complete, and which are still to be sent."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.kv_cache.page_space import PageSpace
from common.kv_cache.radix_cache import RadixCache
from common.messages.generation import SamplingParams
from prefill_node.request import PrefillRequest

PAGE = 4


def request(tokens: int, sampling: SamplingParams | None = None, cached: int = 0) -> PrefillRequest:
    """A prompt with a lease whose first `cached` pages were in the cache."""
    made = PrefillRequest(
        room=1,
        request_id="r",
        keys=np.arange(tokens),
        emitted=0,
        sampling=sampling or SamplingParams(max_tokens=5),
        decode="d",
        received=10.0,
        keyed=tokens,
    )
    space = PageSpace(PAGE, 64, RadixCache(PAGE))
    if cached:
        earlier = space.lease(made.keys, cached, 0)
        assert earlier is not None
        earlier.commit(made.keys[: cached * PAGE])
        earlier.release()
    made.lease = space.lease(made.keys, space.pages_for(tokens), tokens - 1)
    assert made.lease is not None
    assert made.lease.cached_pages == cached
    return made


@pytest.mark.parametrize(
    ("sampling", "most"),
    [
        (SamplingParams(max_tokens=5), 9),
        (SamplingParams(max_tokens=5, prompt_logprobs=0), 0),
        (SamplingParams(max_tokens=5, prompt_logprobs=2, hidden_states_from=4), 0),
        (SamplingParams(max_tokens=5, hidden_states_from=4), 4),
        (SamplingParams(max_tokens=5, hidden_states_from=10), 9),
    ],
)
def test_what_is_read_of_a_prompt_is_not_taken_from_the_cache(sampling: SamplingParams, most: int) -> None:
    assert request(10, sampling).max_cached == most


def test_the_longer_of_two_cached_prefixes_counts() -> None:
    made = request(13, cached=2)
    assert (made.granted, made.reused) == (False, 8)
    made.loaded = 4
    assert made.reused == 8
    made.loaded = 12
    assert made.reused == 12


@given(
    tokens=st.integers(1, 40),
    rewrites=st.integers(0, 2),
    held=st.integers(0, 4),
    chunks=st.lists(st.integers(1, 12), max_size=12),
)
def test_each_page_is_sent_once_when_no_forward_writes_it_any_more(
    tokens: int, rewrites: int, held: int, chunks: list[int]
) -> None:
    made = request(tokens)
    made.rewrites = rewrites
    lease = made.lease
    assert lease is not None
    held = min(held, len(lease.pages))
    sent: list[int] = []
    computed = 0
    for chunk in [*chunks, tokens]:
        computed = min(computed + chunk, tokens)
        complete = made.complete_pages(computed, PAGE)
        if computed < tokens:
            assert complete * PAGE <= max(computed - rewrites, 0)
        first, pages = made.take_pages(complete, held)
        assert pages == tuple(lease.pages[first : first + len(pages)])
        assert not pages or first == held + len(sent)
        sent += pages
    assert sent == lease.pages[held:]
    assert made.take_pages(len(lease.pages), 0)[1] == ()


def test_pages_that_were_sent_are_not_sent_again_by_an_earlier_count() -> None:
    made = request(16)
    assert made.take_pages(3, 0)[0] == 0
    assert made.take_pages(1, 0) == (3, ())
    assert made.take_pages(4, 0)[0] == 3


def test_a_stage_keeps_its_first_time() -> None:
    made = request(4)
    made.mark("prefill_start", 12.0)
    made.mark("prefill_start", 15.0)
    assert made.stages == {"prefill_start": 2.0}
