"""Waiting requests are shared out between clients, the shortest first for each; none waits for ever."""

from __future__ import annotations

import sys
from collections import defaultdict
from types import FrameType

from hypothesis import given, settings
from hypothesis import strategies as st

from router.dispatch.fair_queue import AGEING_TOKENS, PRIORITY_TOKENS, FairQueue, WaitingRequest


def served(queue: FairQueue) -> list[WaitingRequest]:
    """Return all requests in the order of service."""
    order = []
    while (head := queue.head()) is not None:
        queue.take(head)
        order.append(head)
    return order


def test_the_shortest_of_one_client_goes_first() -> None:
    queue = FairQueue()
    for cost in (900, 30, 400):
        queue.push(WaitingRequest("a", cost, 0.0))
    assert [each.cost for each in served(queue)] == [30, 400, 900]


def test_waiting_makes_up_for_length() -> None:
    queue = FairQueue()
    old = WaitingRequest("a", 2000, 0.0)
    queue.push(old)
    queue.push(WaitingRequest("a", 10, 2000 / AGEING_TOKENS + 1))
    assert queue.head() is old


def test_priority_orders_the_requests_of_one_client_only() -> None:
    queue = FairQueue()
    for priority in (1, 0, -1):
        queue.push(WaitingRequest("a", 100, 0.0, priority=priority))
        queue.push(WaitingRequest("b", 90, 0.0))
    order = served(queue)
    assert [each.priority for each in order if each.client == "a"] == [-1, 0, 1]
    assert [each.client for each in order] == ["b", "a"] * 3, "b was first among equals, and stays first"


def test_waiting_makes_up_for_priority() -> None:
    queue = FairQueue()
    old = WaitingRequest("a", 100, 0.0, priority=1)
    queue.push(old)
    queue.push(WaitingRequest("a", 100, PRIORITY_TOKENS / AGEING_TOKENS + 1))
    assert queue.head() is old


def test_a_client_with_one_request_does_not_wait_for_another_with_hundreds() -> None:
    queue = FairQueue()
    for _ in range(200):
        queue.push(WaitingRequest("greedy", 100, 0.0))
    for _ in range(3):
        head = queue.head()
        assert head is not None
        queue.take(head)
    modest = WaitingRequest("modest", 5000, 0.0)
    queue.push(modest)
    order = served(queue)
    assert order.index(modest) <= 1


def test_a_new_client_begins_level_with_those_that_are_there() -> None:
    """What a client was given that has left since does not count, or newcomers would pass everyone."""
    queue = FairQueue()
    queue.let_in("left", 10)
    queue.let_in("stays", 1000)
    queue.leave("left")
    for _ in range(3):
        queue.push(WaitingRequest("new", 100, 0.0))
        queue.push(WaitingRequest("stays", 100, 0.0))
    assert queue.tokens_before("another") == 0
    assert [each.client for each in served(queue)] == ["new", "stays"] * 3
    assert queue.clients == 2


def test_a_client_of_weight_three_gets_three_shares() -> None:
    queue = FairQueue()
    for _ in range(100):
        queue.push(WaitingRequest("paying", 100, 0.0, weight=3))
        queue.push(WaitingRequest("free", 100, 0.0))
        queue.push(WaitingRequest("other", 100, 0.0))
    first = [each.client for each in served(queue)[:50]]
    assert [first.count(name) for name in ("paying", "free", "other")] == [30, 10, 10]


def test_requests_admitted_at_once_count_by_weight_too() -> None:
    queue = FairQueue()
    queue.let_in("paying", 300, weight=3)
    queue.let_in("free", 101)
    queue.push(WaitingRequest("free", 100, 0.0))
    queue.push(WaitingRequest("paying", 100, 0.0, weight=3))
    assert [each.client for each in served(queue)] == ["paying", "free"]


def test_the_expected_wait_goes_by_weight() -> None:
    queue = FairQueue()
    queue.push(WaitingRequest("paying", 900, 0.0, weight=3))
    queue.push(WaitingRequest("free", 900, 0.0))
    assert queue.tokens_before("paying", 3) == 900 + 300
    assert queue.tokens_before("free") == 900 + 900


def test_a_returning_client_gets_no_credit_for_its_absence() -> None:
    queue = FairQueue()
    queue.let_in("busy", 10_000)
    queue.let_in("idle", 10)
    queue.leave("idle")
    queue.push(WaitingRequest("busy", 100, 0.0))
    for _ in range(5):
        queue.push(WaitingRequest("idle", 100, 0.0))
    assert [each.client for each in served(queue)][:2] in (["busy", "idle"], ["idle", "busy"])


def test_cancelled_requests_are_skipped_and_their_clients_forgotten() -> None:
    queue = FairQueue()
    gone, stays = WaitingRequest("a", 1, 0.0), WaitingRequest("b", 2, 0.0)
    queue.push(gone)
    queue.push(stays)
    queue.withdraw(gone)
    assert (len(queue), queue.tokens_before("b"), queue.tokens_before("c")) == (1, 2, 0)
    assert served(queue) == [stays]
    queue.leave("b")
    assert queue.clients == 0
    assert queue.head() is None


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 5000), st.booleans()), max_size=60))
@settings(deadline=None)
def test_each_is_served_once_and_shares_stay_close(requests: list[tuple[str, int, bool]]) -> None:
    queue = FairQueue()
    kept: list[WaitingRequest] = []
    for at, (client, cost, stays) in enumerate(requests):
        waiting = WaitingRequest(client, cost, float(at))
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


WEIGHTS = {client: 1 + number % 3 for number, client in enumerate("abcdefg")}


@given(
    st.lists(
        st.tuples(st.sampled_from(["push", "let_in", "take", "leave"]), st.sampled_from("abcdef")),
        max_size=80,
    ),
    st.data(),
)
@settings(deadline=None)
def test_order_and_estimate_are_those_of_a_look_at_every_client(
    steps: list[tuple[str, str]], data: st.DataObject
) -> None:
    queue = FairQueue()
    given_to: dict[str, float] = {}
    present: dict[str, int] = defaultdict(int)
    waiting: dict[str, list[WaitingRequest]] = defaultdict(list)

    def enters(client: str) -> None:
        if not present[client]:
            given_to[client] = min((given_to[each] for each, n in present.items() if n), default=0.0)
        present[client] += 1

    for number, (step, client) in enumerate(steps):
        cost = data.draw(st.integers(1, 5000))
        weight = WEIGHTS[client]
        if step == "push":
            enters(client)
            waiting[client].append(WaitingRequest(client, cost, float(number), weight))
            queue.push(waiting[client][-1])
        elif step == "let_in":
            enters(client)
            given_to[client] += cost / weight
            queue.let_in(client, cost, weight)
        elif step == "take" and (head := queue.head()) is not None:
            queue.take(head)
            waiting[head.client].remove(head)
            given_to[head.client] += head.cost / head.weight
        elif step == "leave" and present[client] > len(waiting[client]):
            queue.leave(client)
            present[client] -= 1
        ahead = {each: min(map(_key, waiting[each])) for each in waiting if waiting[each]}
        expected = min(ahead, key=lambda each: (given_to[each], ahead[each]), default=None)
        head = queue.head()
        assert (head and (given_to[head.client], _key(head))) == (
            expected and (given_to[expected], ahead[expected])
        )
        costs = {each: sum(w.cost for w in waiting[each]) for each, n in present.items() if n}
        least = min((given_to[each] for each in costs), default=0.0)
        for each in "abcdefg":
            turn = given_to[each] + costs[each] / WEIGHTS[each] if each in costs else least
            before = sum(
                min(cost, max(turn - given_to[other], 0) * WEIGHTS[other]) for other, cost in costs.items()
            )
            assert abs(queue.tokens_before(each, WEIGHTS[each]) - before) <= 1


def _key(waiting: WaitingRequest) -> float:
    return waiting.cost + AGEING_TOKENS * waiting.since


def _calls_of_waits_that_end(clients: int) -> float:
    """Return the Python calls per request if `clients` clients wait and all waits end."""
    queue = FairQueue()
    requests = [WaitingRequest(f"client-{number}", 10, 0.0) for number in range(clients)]
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += 1

    sys.setprofile(count)
    try:
        for waiting in requests:
            queue.tokens_before(waiting.client)
            queue.push(waiting)
            queue.head()
        for waiting in requests:
            queue.withdraw(waiting)
            queue.tokens_before(waiting.client)
            queue.head()
    finally:
        sys.setprofile(None)
    assert not len(queue)
    return calls / clients


def test_a_request_costs_the_same_among_hundreds_and_thousands_of_clients() -> None:
    assert _calls_of_waits_that_end(4000) < 2 * _calls_of_waits_that_end(400)


def test_clients_that_have_left_are_forgotten_while_another_stays() -> None:
    queue = FairQueue()
    queue.let_in("stays", 0)
    for number in range(10_000):
        queue.let_in(f"client-{number}", 5)
        queue.leave(f"client-{number}")
    assert queue.ranks < 1000
