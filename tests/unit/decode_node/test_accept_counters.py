"""Counters of speculation count lengths, positions in the draft chain, and each request's own part."""

from __future__ import annotations

import pytest

from common.messages.generation import OutputToken, SamplingParams
from common.messages.identity import NodeRef
from decode_node.accept_counters import AcceptCounters
from decode_node.request import DecodeRequest, Emission

PEER = NodeRef(name="prefill-0", role="prefill", incarnation="0" * 32)


def request(room: int) -> DecodeRequest:
    sampling = SamplingParams(max_tokens=99)
    return DecodeRequest(room, f"r{room}", [1], 0, sampling, PEER, received=0.0, deadline=1.0)


def emission(of: DecodeRequest, tokens: int, drafted: int) -> Emission:
    return Emission(of, [OutputToken(7)] * tokens, drafted)


def test_lengths_places_and_requests() -> None:
    """Accepted drafts are counted by length, by position and by request."""
    counters, one, other = AcceptCounters(), request(1), request(2)
    for of, tokens, drafted in ((one, 3, 4), (one, 1, 4), (other, 5, 4), (one, 2, 1)):
        counters.count(emission(of, tokens, drafted), tokens)
    assert counters.mean_emitted == counters.mean_verified == 11 / 4
    assert (counters.drafts, counters.draft_tokens, counters.accepted_tokens) == (4, 13, 7)
    assert counters.accepted_at == [3, 2, 1, 1]
    assert sum(counters.accepted_at) == counters.accepted_tokens
    assert one.accept_length == pytest.approx(2.0)
    assert other.accept_length == 5.0


def test_tokens_after_the_end_of_an_answer_are_not_emitted() -> None:
    """max_tokens 2: the prompt gave the first token, and the one round may emit one of the six that it accepted."""
    counters, cut = AcceptCounters(), request(1)
    counters.count(emission(cut, 6, 5), 1)
    assert counters.mean_emitted == 1.0
    assert counters.mean_verified == 6.0
    assert cut.accept_length == 1.0
    assert counters.accepted_tokens == 5


def test_rounds_without_drafts_count_only_as_steps() -> None:
    counters, plain = AcceptCounters(), request(1)
    counters.count(emission(plain, 1, 0), 1)
    assert (counters.steps, counters.drafts, counters.accepted_at) == (1, 0, [])
    assert plain.accept_length is None


def test_what_verifies_drafts() -> None:
    """Forced tokens are verified as drafts, too."""
    kinds = [
        Emission(request(1), [OutputToken(7)], drafted, forced)
        for drafted, forced in ((0, 0), (2, 0), (0, 3))
    ]
    assert [each.verified_drafts for each in kinds] == [False, True, True]


def test_fillers_after_the_drafts_do_not_count_as_drafts() -> None:
    """A filler that happens to be right is emitted but does not count as a draft."""
    counters, lucky = AcceptCounters(), request(1)
    counters.count(emission(lucky, 3, 1), 3)
    assert counters.accepted_tokens == 1
    assert counters.accepted_at == [1]


def test_forced_tokens_are_counted_by_themselves() -> None:
    counters, one = AcceptCounters(), request(1)
    for tokens, forced in ((4, 5), (3, 2)):
        counters.count(Emission(one, [OutputToken(7)] * tokens, 0, forced), tokens)
    assert (counters.forced_tokens, counters.accepted_forced) == (7, 5)
    assert (counters.drafts, counters.draft_tokens, counters.accepted_tokens) == (0, 0, 0)
    assert one.accept_length == 3.5
