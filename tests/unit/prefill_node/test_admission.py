"""Which waiting prompt gets pages: short ones soon, long ones eventually, and none that would deadlock the pool."""

from __future__ import annotations

import dataclasses

from msgspec.structs import replace

from tests.fakes.node_cluster import NodeCluster, Shape
from tests.fakes.scenarios import expect_reference, prompt_of

LONG = 60  # tokens
SHAPE = Shape(
    page_size=4, chunk_tokens=8, prefill_batch=2, max_len=64, prefill_cache=False, decode_cache=False
)


def test_a_short_prompt_does_not_wait_for_all_long_ones() -> None:
    with NodeCluster(SHAPE) as cluster:
        long = [cluster.submit(prompt_of(LONG, seed), 2) for seed in range(12)]
        cluster.turn(6, dt=1.0)
        short = cluster.submit(prompt_of(3), 2)
        cluster.run()
        expect_reference(short, *long)
        assert short.first_token_turn is not None
        before = [each for each in long if (each.first_token_turn or 0) < short.first_token_turn]
        assert len(before) <= 2, "only prompts that were being computed already come first"
        cluster.settle()


def test_a_short_prompt_does_not_wait_for_long_ones_that_fill_both_pools() -> None:
    """Decode pages, prefill pages and its forward each come after one long prompt rather than after all of them."""
    shape = dataclasses.replace(SHAPE, prefill_pool=192, decode_pool=192, max_running=2, reserved_tokens=4)
    with NodeCluster(shape) as cluster:
        long = [cluster.submit(prompt_of(LONG - 10, seed), 10) for seed in range(20)]
        cluster.turn(30, dt=0.1)
        done = sum(call.over for call in long)
        short = cluster.submit(prompt_of(3), 10)
        cluster.run(until=lambda: short.over, dt=0.1)
        assert sum(call.over for call in long) - done <= 6
        cluster.run()
        expect_reference(short, *long)
        cluster.settle()


def test_equal_prompts_are_answered_in_the_order_in_which_they_came() -> None:
    with NodeCluster(SHAPE) as cluster:
        calls = []
        for seed in range(6):
            calls.append(cluster.submit(prompt_of(LONG, seed), 2))
            cluster.turn(2, dt=0.1)
        cluster.run()
        turns = [call.first_token_turn or 0 for call in calls]
        assert turns == sorted(turns)
        cluster.settle()


def test_a_long_prompt_is_computed_while_short_ones_keep_coming() -> None:
    """Two short prompts per turn are all that the node can compute: without ageing the long one would never run."""
    patient = replace(SHAPE.transfer, first_page_timeout=1e6, stall_timeout=1e6)
    with NodeCluster(dataclasses.replace(SHAPE, transfer=patient)) as cluster:
        long = cluster.submit(prompt_of(LONG), 2)
        short = []
        for seed in range(400):
            short += [cluster.submit(prompt_of(4, 2 * seed + each), 1) for each in range(2)]
            cluster.turn(dt=1.0)
            if long.output:
                break
        assert long.output
        assert len(short) > 20, "the short ones went first at the beginning"
        cluster.run()
        expect_reference(long, *short)
        cluster.settle()


def test_a_prompt_without_decode_pages_is_passed_by_those_that_have_them() -> None:
    """The short prompt would take room that the longest prompt needs; the long one has its pages at the decode node."""
    shape = Shape(page_size=4, chunk_tokens=64, prefill_pool=64, max_len=64, prefill_cache=False)
    with NodeCluster(shape) as cluster:
        ungranted = cluster.submit(prompt_of(5), 2, legs="p")
        cluster.turn(3)
        assert not ungranted.output
        granted = cluster.submit(prompt_of(LONG), 2)
        cluster.run(until=lambda: granted.over)
        assert not ungranted.output
        cluster.send_leg(ungranted, "d")
        cluster.run()
        expect_reference(granted, ungranted)
        cluster.settle()


def test_a_prompt_with_decode_pages_that_does_not_fit_is_not_passed() -> None:
    """The long prompt waits for pages of one that is being handed over; if overtaken, it would never fit."""
    shape = Shape(page_size=4, chunk_tokens=8, prefill_pool=88, max_len=64, prefill_cache=False)
    with NodeCluster(shape) as cluster:
        first = cluster.submit(prompt_of(40), 2)
        cluster.turn(2)
        long = cluster.submit(prompt_of(LONG), 2)
        cluster.turn(2)
        (waiting,) = cluster.prefill.node.queues.waiting.values()
        assert waiting.granted
        waiting.received -= 10_000.0  # it has waited so long that nothing costs less
        small = cluster.submit(prompt_of(20), 2)
        cluster.turn(1)
        assert list(cluster.prefill.node.queues.waiting) == [long.room, small.room]
        cluster.run()
        assert (long.first_token_turn or 0) <= (small.first_token_turn or 0)
        expect_reference(first, long, small)
        cluster.settle()


def test_counts_of_waiting_prompts_follow_them() -> None:
    with NodeCluster(SHAPE) as cluster:
        calls = [cluster.submit(prompt_of(LONG, seed), 2) for seed in range(5)]
        cluster.turn_one(cluster.prefill)
        load = cluster.prefill.link.load
        assert (load.queued, load.running) == (3, 2)
        # The first forward has been launched: nobody waits for the report.
        launched = sum(each.scheduled for each in cluster.prefill.node.queues.computing.values())
        assert launched > 0
        assert load.queued_tokens == 5 * LONG - launched
        cluster.abort(calls[4])
        cluster.turn_one(cluster.prefill)
        assert cluster.prefill.node.queues.waiting_tokens == 2 * LONG
        cluster.run()
        assert cluster.prefill.node.queues.waiting_tokens == 0
        cluster.settle()
