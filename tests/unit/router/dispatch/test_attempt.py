"""An attempt merges two token streams by offset."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from common.errors import InternalError, NodeLost, TransferFailed
from common.messages.generation import OutputToken
from common.messages.identity import NodeRef, Role
from common.messages.router_inbox import FirstToken, Register, TokenRun
from router.dispatch import attempt as module
from router.dispatch.attempt import Attempt
from router.dispatch.verified_steps import VerifiedSteps
from router.nodes.registry import Node


def node(role: Role, name: str = "") -> Node:
    ref = NodeRef(name=name or role, role=role, incarnation=role * 4)
    register = Register(
        node=ref,
        host="h",
        pid=1,
        model_fingerprint="f",
        max_model_len=9,
        page_size=1,
        total_pages=9,
        effective_config={},
    )
    return Node(register, 0.0)


def attempt() -> Attempt:
    return Attempt(7, node("prefill"), node("decode"))


def run(offset: int, ids: list[int], finish: str | None = None) -> TokenRun:
    return TokenRun(7, offset, [OutputToken(i) for i in ids], finish)


def verified(offset: int, ids: list[int], finish: str | None = None) -> TokenRun:
    return replace(run(offset, ids, finish), verified=True)


def first(token: int, finish: str | None = None) -> FirstToken:
    return FirstToken(room=7, token=OutputToken(token), finish_reason=finish, cached_tokens=5)


def ids(made: Attempt) -> list[int]:
    return [token.id for token in made.take()]


def test_in_order() -> None:
    made = attempt()
    made.on_first_token(first(10))
    assert ids(made) == [10]
    assert made.cached_tokens == 5
    made.on_run(run(1, [11]))
    made.on_run(run(2, [12, 13], "length"))
    assert (ids(made), made.finish_reason) == ([11, 12, 13], "length")
    assert ids(made) == []


def test_steps_that_verified_drafts() -> None:
    """They are counted by their place in the answer, however their tokens reach the reader, and each once."""
    steps = VerifiedSteps()
    made = Attempt(7, node("prefill"), node("decode"), emitted=5, steps=steps)
    made.on_run(verified(1, [11, 12, 13]))
    made.on_first_token(first(10))
    made.on_run(verified(1, [11, 12, 13]))
    assert ids(made) == [10, 11, 12, 13]
    made.on_run(run(4, [14]))
    made.on_run(verified(4, [14, 15, 16]))
    assert ids(made) == [14, 15, 16]
    taken: list[int] = []

    def take_now(tokens: Sequence[OutputToken]) -> bool:
        taken.append(len(tokens))
        made.next_offset += len(tokens)
        return True

    made.direct = take_now
    made.on_run(verified(7, [17, 18]))
    assert taken == [2]
    made.on_run(verified(9, [19], "length"))
    found = []
    for count in (15, 14, 12, 10, 9, 7, 6):
        steps.end(count)
        found.append((steps.count, steps.accept_length))
    assert found == [(4, 2.0), (3, 7 / 3), (2, 2.5), (1, 3.0), (1, 3.0), (1, 1.0), (0, None)]


def test_decode_tokens_may_overtake_the_first_one() -> None:
    made = attempt()
    made.on_run(run(2, [12], "stop"))
    made.on_run(run(1, [11]))
    assert (ids(made), made.finish_reason) == ([], None)
    assert not made.woken.is_set
    made.on_first_token(first(10))
    assert (ids(made), made.finish_reason) == ([10, 11, 12], "stop")


def test_repeats_are_dropped_also_in_part() -> None:
    made = attempt()
    made.on_first_token(first(10))
    made.on_first_token(first(10))
    made.on_run(run(0, [10, 11, 12]))
    made.on_run(run(1, [11]))
    made.on_run(run(2, [12, 13]))
    assert ids(made) == [10, 11, 12, 13]


def test_an_early_run_that_was_reached_in_part_still_counts() -> None:
    made = attempt()
    made.on_run(run(3, [13, 14], "stop"))
    made.on_run(run(0, [10, 11, 12, 13]))
    assert (ids(made), made.finish_reason) == ([10, 11, 12, 13, 14], "stop")
    assert not made.early


class Taker:
    """Takes tokens at once while it is `willing`."""

    def __init__(self) -> None:
        self.willing = True
        self.ids: list[int] = []

    def __call__(self, tokens: Sequence[OutputToken]) -> bool:
        if self.willing:
            self.ids += [token.id for token in tokens]
        return self.willing


def waiting_reader() -> tuple[Attempt, Taker]:
    """An attempt whose reader has the first token and waits, as the dispatcher sets it up."""
    made, taker = attempt(), Taker()
    made.on_first_token(first(10))
    assert ids(made) == [10]

    def take_now(tokens: Sequence[OutputToken]) -> bool:
        if not taker(tokens):
            return False
        made.next_offset += len(tokens)
        return True

    made.direct = take_now
    return made, taker


def test_a_waiting_reader_gets_runs_at_once() -> None:
    made, taker = waiting_reader()
    made.on_run(run(1, [11]))
    made.on_run(run(2, [12, 13]))
    assert taker.ids == [11, 12, 13]
    assert made.answer_tokens == 4
    assert not made.pending
    assert not made.woken.is_set


def test_after_tokens_for_the_task_nothing_overtakes_them() -> None:
    made, taker = waiting_reader()
    taker.willing = False
    made.on_run(run(1, [11]))
    taker.willing = True
    made.on_run(run(2, [12]))
    assert made.woken.is_set
    assert (taker.ids, ids(made)) == ([], [11, 12])


def test_the_task_gets_the_end_and_what_was_early_repeated_or_long() -> None:
    made, taker = waiting_reader()
    made.on_run(run(3, [13]))
    made.on_run(run(1, [11, 12]))
    assert (taker.ids, ids(made)) == ([], [11, 12, 13])
    for odd in (run(0, [10, 11]), run(1, list(range(11, 11 + module.MAX_DIRECT + 1))), run(1, [11], "stop")):
        made, taker = waiting_reader()
        made.on_run(odd)
        assert not taker.ids
        assert ids(made) == [each.id for each in odd.tokens if each.id > 10]


def test_a_failed_attempt_gives_nothing_to_the_reader_directly() -> None:
    made, taker = waiting_reader()
    made.fail(NodeLost("b"))
    made.on_run(run(1, [11]))
    assert not taker.ids


def test_nothing_comes_after_the_end() -> None:
    made = attempt()
    made.on_first_token(first(10, "stop"))
    made.on_run(run(1, [11], "length"))
    assert (ids(made), made.finish_reason) == ([10], "stop")


def test_the_first_failure_counts_and_none_after_the_end() -> None:
    made = attempt()
    made.fail(TransferFailed("a"))
    made.fail(NodeLost("b"))
    assert isinstance(made.error, TransferFailed)
    assert made.woken.is_set
    ended = attempt()
    ended.on_first_token(first(10, "stop"))
    ended.fail(NodeLost("b"))
    assert ended.error is None


def test_a_lost_node_gets_no_abort() -> None:
    made = attempt()
    made.lose(made.decode, "silence")
    assert (made.prefill_over, made.decode_over) == (False, True)
    assert str(made.error) == "decode node decode was lost: silence"
    made.lose(made.prefill, "silence")
    assert made.prefill_over


def test_a_node_that_is_far_ahead_is_an_error() -> None:
    made = attempt()
    for offset in range(1, module.MAX_EARLY_RUNS + 2):
        made.on_run(run(offset, [offset]))
    assert isinstance(made.error, InternalError)
    assert len(made.early) == module.MAX_EARLY_RUNS


@given(
    st.lists(st.integers(0, 60), min_size=1, max_size=12, unique=True),
    st.randoms(use_true_random=False),
    st.booleans(),
)
def test_any_order_gives_the_text(cuts: list[int], rng: object, repeat: bool) -> None:
    """However runs are divided, ordered and repeated, the client gets each of the tokens 0 .. n-1 once."""
    import random

    assert isinstance(rng, random.Random)
    text = list(range(100, 161))
    bounds = sorted({0, *cuts, len(text)})
    runs = [
        run(
            a, text[a : b + (rng.randint(0, 3) if b < len(text) else 0)], "length" if b == len(text) else None
        )
        for a, b in pairwise(bounds)
    ]
    runs += rng.sample(runs, len(runs) // 2) if repeat else []
    runs = [r for r in runs if r.finish_reason is None or r.offset + len(r.tokens) == len(text)]
    rng.shuffle(runs)
    made = attempt()
    got: list[int] = []
    for each in runs:
        made.on_run(each)
        got += ids(made)
    assert got == text
    assert made.finish_reason == "length"
    assert not made.early


class CountingInt(int):
    """Counts how often it is compared."""

    compared = 0

    def __lt__(self, other: int) -> bool:
        CountingInt.compared += 1
        return int(self) < int(other)


def test_thousands_of_early_runs_are_taken_in_without_a_search_for_each() -> None:
    made = attempt()
    count = module.MAX_EARLY_RUNS
    for offset in range(count, 0, -1):
        made.on_run(run(CountingInt(offset), [offset]))
    CountingInt.compared = 0
    made.on_run(run(0, [0]))
    assert [token.id for token in made.pending] == list(range(count + 1))
    assert CountingInt.compared < 20 * count


def test_much_is_taken_in_parts_and_the_request_stays_awake() -> None:
    made = attempt()
    count = 3 * module.MAX_TAKEN + 1
    made.on_run(run(0, list(range(count)), "length"))
    taken = []
    while made.woken.is_set:
        taken.append(ids(made))
    assert [token for part in taken for token in part] == list(range(count))
    assert max(map(len, taken)) == module.MAX_TAKEN
    assert not made.pending
