"""Two real nodes give the tokens of a plain recomputation, however the work is divided."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from common.messages.node_inbox import FlushCache
from common.node.completion import Deferred, Immediate
from common.node.overlap import Completion
from tests.fakes.covering import pairs
from tests.fakes.node_cluster import Call, NodeCluster, Shape
from tests.fakes.scenarios import SAMPLED, expect_reference, expect_retraction, lose_decode, prompt_of
from tests.fakes.tiny_model import VOCAB


@pytest.mark.parametrize(
    ("chunk", "page_size", "completion"), pairs((1, 5, 16, 512), (1, 4, 16), (Immediate, Deferred))
)
def test_chunks_and_pages(chunk: int, page_size: int, completion: type[Completion]) -> None:
    shape = Shape(chunk_tokens=chunk, page_size=page_size, completion=completion)
    with NodeCluster(shape) as cluster:
        calls = [cluster.submit(prompt_of(n), 9) for n in (1, 2, 3, 4, 5, 15, 16, 17, 40)]
        calls += [cluster.submit(prompt_of(n), 9, seed=n, **SAMPLED) for n in (3, 20)]
        cluster.run()
        expect_reference(*calls)
        cluster.settle()


@pytest.mark.parametrize(("prefill_cache", "decode_cache"), [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("page_size", [1, 4])
def test_prefix_hits_at_every_page_boundary(page_size: int, prefill_cache: bool, decode_cache: bool) -> None:
    """A second prompt shares 0 .. n tokens with the first, for every length around the boundaries."""
    shape = Shape(page_size=page_size, prefill_cache=prefill_cache, decode_cache=decode_cache)
    with NodeCluster(shape) as cluster:
        first = prompt_of(13)
        expect_reference(_answer(cluster, first))
        for shared in range(len(first) + 1):
            second = first[:shared] + [(token + 1) % VOCAB for token in first[shared:]]
            for extra in ([], [5], [5, 6, 7, 8, 9]):
                call = _answer(cluster, second + extra)
                expect_reference(call)
                assert call.cached_tokens is not None
                assert call.cached_tokens % page_size == 0
                assert prefill_cache or call.cached_tokens == 0
        cluster.settle()
        moved = cluster.decode.receiver.counters.pages_received
        again = _answer(cluster, first)
        expect_reference(again)
        sent = cluster.decode.receiver.counters.pages_received - moved
        assert sent == (-(-13 // page_size) - 13 // page_size if decode_cache else -(-13 // page_size))
        assert again.cached_tokens == (12 // page_size * page_size if prefill_cache else 0)
        cluster.settle()


def test_a_flush_empties_the_caches_before_the_requests_that_follow() -> None:
    with NodeCluster(Shape(page_size=4)) as cluster:
        cached, moved = [], []
        for flush in (False, False, True):
            if flush:
                cluster.prefill.link.deliver(FlushCache())
                cluster.decode.link.deliver(FlushCache())
            before = cluster.decode.receiver.counters.pages_received
            call = _answer(cluster, prompt_of(13))
            expect_reference(call)
            cached.append(call.cached_tokens)
            moved.append(cluster.decode.receiver.counters.pages_received - before)
            cluster.settle()
        assert (cached, moved) == ([0, 12, 0], [4, 1, 4])


def test_salts_share_no_page_on_either_node() -> None:
    """A salt's first request computes and transfers every page, whatever others have sent."""
    with NodeCluster(Shape(page_size=4)) as cluster:
        cached, moved = [], []
        for salt in (b"one", b"other", b"", b"one", b"other", b""):
            before = cluster.decode.receiver.counters.pages_received
            call = _answer(cluster, prompt_of(13), salt=salt)
            expect_reference(call)
            cached.append(call.cached_tokens)
            moved.append(cluster.decode.receiver.counters.pages_received - before)
            cluster.settle()
        assert (cached, moved) == ([0, 0, 0, 12, 12, 12], [4, 4, 4, 1, 1, 1])


def test_many_salts_in_a_small_pool() -> None:
    """Cached pages of all salts are evicted in one order; retracted requests return under their salts."""
    with NodeCluster(Shape(page_size=4, prefill_pool=160, decode_pool=96, reserved_tokens=4)) as cluster:
        for _ in range(2):
            calls = [
                cluster.submit(prompt_of(21), 20, salt=number.to_bytes(2, "big")) for number in range(16)
            ]
            cluster.run()
            expect_reference(*calls)
            cluster.settle()
        assert cluster.decode.link.counters.retractions > 0


def test_the_next_turn_of_a_chat_moves_only_new_pages() -> None:
    with NodeCluster(Shape(page_size=4)) as cluster:
        history = prompt_of(21)
        for turn in range(4):
            before = cluster.decode.receiver.counters.pages_received
            call = _answer(cluster, history, max_tokens=11)
            expect_reference(call)
            moved = cluster.decode.receiver.counters.pages_received - before
            # The decode node computed the KV of every token of its answers except the last.
            held = (len(call.prompt) - 5 - 1) // 4 if turn else 0
            assert moved == -(-len(call.prompt) // 4) - held
            history = call.prompt + call.ids + prompt_of(5, turn)
        cluster.settle()


def _answer(cluster: NodeCluster, prompt: list[int], max_tokens: int = 3, salt: bytes = b"") -> Call:
    call = cluster.submit(prompt, max_tokens, salt=salt)
    cluster.run()
    return call


@pytest.mark.parametrize("completion", [Immediate, Deferred])
def test_sampled_output_does_not_depend_on_the_batch(completion: type[Completion]) -> None:
    """A request has one text by itself, in a batch and twice at once: it follows from prompt and parameters."""
    with NodeCluster(Shape(completion=completion, max_running=5)) as cluster:
        calls: list[Call] = []
        chosen: tuple[dict[str, Any], ...] = (
            {"temperature": 0.0},
            {"temperature": 1.0, "seed": 1},
            {"temperature": 0.7, "top_k": 5, "seed": 2},
            {"temperature": 1.3, "top_p": 0.8, "seed": 3},
            {"temperature": 1.5, "top_p": 0.9, "top_k": 11, "seed": 2**63 - 1},
            {"temperature": 1.0, "seed": 1, "logprobs": 3},
        )
        for index, sampling in enumerate(chosen):
            for length in (5, 40):
                calls += [cluster.submit(prompt_of(length, index // 5), 12, **sampling) for _ in range(2)]
        cluster.run()
        expect_reference(*calls)
        assert calls[2].ids != calls[6].ids, "temperatures and seeds differ, so do the texts"
        assert all(
            (token.logprob is None) == (call.sampling.logprobs is None)
            for call in calls
            for token in call.output
        )
        cluster.settle()


@pytest.mark.parametrize(
    ("completion", "page_size", "decode_cache"), pairs((Immediate, Deferred), (1, 4, 16), (True, False))
)
def test_retracted_requests_resume_with_the_same_tokens(
    completion: type[Completion], page_size: int, decode_cache: bool
) -> None:
    shape = Shape(
        page_size=page_size,
        decode_pool=96,
        reserved_tokens=4,
        completion=completion,
        decode_cache=decode_cache,
        max_running=4,
    )
    expect_retraction(shape)


@pytest.mark.parametrize("completion", [Immediate, Deferred])
def test_preempted_requests_continue_after_resubmission(completion: type[Completion]) -> None:
    """Without room for backups the request fails with `preempted` and is placed again with its tokens so far."""
    shape = Shape(page_size=4, decode_pool=96, reserved_tokens=4, backup_bytes=0, completion=completion)
    with NodeCluster(shape) as cluster:
        calls = [cluster.submit(prompt_of(10 + n, n), 40, seed=n, **SAMPLED) for n in range(4)]
        cluster.run()
        expect_reference(*calls)
        assert {failed.code for failed in cluster.failures} == {"preempted"}
        assert cluster.decode.link.counters.retractions == len(cluster.failures) > 0
        assert any(call.base > 0 for call in calls), "some continuation started in the middle of its answer"
        cluster.settle()


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {**SAMPLED, "seed": 5}])
def test_migration_at_every_token(sampling: dict[str, Any]) -> None:
    """The decode node is lost after k tokens, for every k: the other one continues the same text."""
    prompt = prompt_of(18)
    for k in range(1, 9):
        with NodeCluster(Shape(page_size=4, decodes=2)) as cluster:
            call = cluster.submit(prompt, 9, **sampling)
            cluster.run(until=lambda call=call, k=k: len(call.output) >= k)  # type: ignore[misc]
            lose_decode(cluster, call)


@pytest.mark.parametrize("reserved", [0, 1, 8])
def test_a_pool_for_one_request_serves_many(reserved: int) -> None:
    """Every request fits by itself and no two fit together: all end, in turn, and none starves."""
    shape = Shape(page_size=4, decode_pool=48, reserved_tokens=reserved, max_running=4)
    with NodeCluster(shape) as cluster:
        # pages fill up at different times
        calls = [cluster.submit(prompt_of(8 + n), 40 - n) for n in range(4)]
        cluster.run(limit=1500)
        expect_reference(*calls)
        cluster.settle()


def test_the_longest_request_that_fits() -> None:
    for page_size in (1, 16):
        shape = replace(Shape(), page_size=page_size, decode_pool=64, prefill_pool=64)
        with NodeCluster(shape) as cluster:
            call = cluster.submit(prompt_of(44), 20)
            cluster.run()
            expect_reference(call)
            for length in (63, 64):
                # The only token of the answer is not computed with, so it needs no place.
                whole = cluster.submit(prompt_of(length), 1)
                cluster.run()
                expect_reference(whole)
            longer = cluster.submit(prompt_of(65), 1)
            cluster.run()
            assert longer.error is not None
            refused = cluster.submit(prompt_of(44), 21)
            cluster.run()
            assert refused.error is not None
            assert (refused.error.code, refused.error.message) == (
                "invalid_value",
                "prompt and max_tokens together need 65 tokens; this cluster serves at most 64; lower max_tokens",
            )
            cluster.settle()


@pytest.mark.parametrize("reserved", [0, 4])
@pytest.mark.parametrize("later", [9, 10, 11, 12])
def test_a_retracted_request_does_not_return_for_pages_that_others_wait_for(
    later: int, reserved: int
) -> None:
    """The request that needs a page is far ahead; the victim has room left in its last page."""
    shape = Shape(page_size=4, decode_pool=48, reserved_tokens=reserved, decode_cache=False)
    with NodeCluster(shape) as cluster:
        ahead = cluster.submit(prompt_of(8), 36)
        cluster.run(until=lambda: len(ahead.output) >= 18)
        behind = cluster.submit(prompt_of(later), 20)
        cluster.run(limit=300)
        expect_reference(ahead, behind)
        assert cluster.decode.link.counters.retractions <= 2
        cluster.settle()
