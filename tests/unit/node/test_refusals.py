"""A node ends if routers refuse it, but not for one of them while others serve it."""

from __future__ import annotations

from common.node.refusals import ANSWER_SECONDS, Refusals
from common.node.to_router import NoRouter

A, B = NoRouter(), NoRouter()


def test_the_only_router_decides() -> None:
    assert Refusals().final(A, [], 1, 0.0)
    assert Refusals().final(A, [A], 1, 0.0)


def test_a_router_does_not_end_a_node_that_another_one_serves() -> None:
    refusals = Refusals()
    assert not refusals.final(B, [A], 2, 0.0)
    assert not refusals.final(B, [A], 2, 10 * ANSWER_SECONDS)


def test_a_router_that_served_it_does() -> None:
    assert Refusals().final(A, [A, B], 2, 0.0), "it sent too many invalid frames"


def test_all_routers_together_do() -> None:
    refusals = Refusals()
    assert not refusals.final(A, [], 2, 0.0)
    assert not refusals.final(A, [], 2, 0.5), "the other one has not answered yet"
    assert refusals.final(B, [], 2, 0.6)


def test_without_an_answer_of_the_others_it_ends_after_a_while() -> None:
    refusals = Refusals()
    assert not refusals.final(A, [], 2, 100.0)
    assert not refusals.final(A, [], 2, 100.0 + ANSWER_SECONDS)
    assert refusals.final(A, [], 2, 100.1 + ANSWER_SECONDS)


def test_the_wait_begins_anew_once_a_router_has_served_it() -> None:
    refusals = Refusals()
    assert not refusals.final(B, [], 2, 0.0)
    assert not refusals.final(B, [A], 2, 1.0)
    assert not refusals.final(B, [], 2, 100.0), "A has just ended"
    assert refusals.final(B, [], 2, 100.1 + ANSWER_SECONDS)
