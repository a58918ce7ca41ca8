"""Who is next: shares between clients, the shortest first within one, and nobody waits for ever."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from router.fair_queue import AGEING_TOKENS, FairQueue, Waiting


def served(queue: FairQueue) -> list[Waiting]:
    """Everything, in its order."""
    order = []
    while (head := queue.head()) is not None:
        queue.take(head)
        order.append(head)
    return order


def test_the_shortest_of_one_client_goes_first() -> None:
    queue = FairQueue()
    for cost in (900, 30, 400):
        queue.push(Waiting("a", cost, 0.0))
    assert [each.cost for each in served(queue)] == [30, 400, 900]


def test_waiting_makes_up_for_length() -> None:
    queue = FairQueue()
    old = Waiting("a", 2000, 0.0)
    queue.push(old)
    queue.push(Waiting("a", 10, 2000 / AGEING_TOKENS + 1))
    assert queue.head() is old


def test_a_client_with_one_request_does_not_wait_for_another_with_hundreds() -> None:
    queue = FairQueue()
    for _ in range(200):
        queue.push(Waiting("greedy", 100, 0.0))
    for _ in range(3):
        head = queue.head()
        assert head is not None
        queue.take(head)
    modest = Waiting("modest", 5000, 0.0)
    queue.push(modest)
    order = served(queue)
    assert order.index(modest) <= 1


def test_a_client_of_weight_three_gets_three_shares() -> None:
    queue = FairQueue()
    for _ in range(100):
        queue.push(Waiting("paying", 100, 0.0, weight=3))
        queue.push(Waiting("free", 100, 0.0))
        queue.push(Waiting("other", 100, 0.0))
    first = [each.client for each in served(queue)[:50]]
    assert [first.count(name) for name in ("paying", "free", "other")] == [30, 10, 10]


def test_what_was_let_in_at_once_counts_by_weight_too() -> None:
    queue = FairQueue()
    queue.let_in("paying", 300, weight=3)
    queue.let_in("free", 101)
    queue.push(Waiting("free", 100, 0.0))
    queue.push(Waiting("paying", 100, 0.0, weight=3))
    assert [each.client for each in served(queue)] == ["paying", "free"]


def test_the_expected_wait_goes_by_weight() -> None:
    queue = FairQueue()
    queue.push(Waiting("paying", 900, 0.0, weight=3))
    queue.push(Waiting("free", 900, 0.0))
    assert queue.tokens_before("paying", 3) == 900 + 300
    assert queue.tokens_before("free") == 900 + 900


def test_who_comes_back_does_not_get_what_it_did_not_use() -> None:
    queue = FairQueue()
    queue.let_in("busy", 10_000)
    queue.let_in("idle", 10)
    queue.leave("idle")
    queue.push(Waiting("busy", 100, 0.0))
    for _ in range(5):
        queue.push(Waiting("idle", 100, 0.0))
    assert [each.client for each in served(queue)][:2] in (["busy", "idle"], ["idle", "busy"])


def test_one_that_left_is_passed_over_and_clients_are_forgotten() -> None:
    queue = FairQueue()
    gone, stays = Waiting("a", 1, 0.0), Waiting("b", 2, 0.0)
    queue.push(gone)
    queue.push(stays)
    queue.withdraw(gone)
    assert (len(queue), queue.tokens_before("b"), queue.tokens_before("c")) == (1, 2, 0)
    assert served(queue) == [stays]
    queue.leave("b")
    assert queue._clients == {}
    assert queue.head() is None


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 5000), st.booleans()), max_size=60))
@settings(deadline=None)
def test_each_is_served_once_and_shares_stay_close(requests: list[tuple[str, int, bool]]) -> None:
    queue = FairQueue()
    kept: list[Waiting] = []
    for at, (client, cost, stays) in enumerate(requests):
        waiting = Waiting(client, cost, float(at))
        queue.push(waiting)
        if stays:
            kept.append(waiting)
        else:
            queue.withdraw(waiting)
    assert len(queue) == len(kept)
    left = {client: [each for each in kept if each.client == client] for client in "abc"}
    given = dict.fromkeys("abc", 0)
    largest = max((each.cost for each in kept), default=0)
    for waiting in served(queue):
        left[waiting.client].remove(waiting)
        given[waiting.client] += waiting.cost
        behind = [given[client] for client in "abc" if left[client]]
        assert all(given[waiting.client] - each <= largest for each in behind)
    assert not any(left.values())
    assert not any(queue.tokens_before(client) for client in "abcd")
