"""Which request is to blame for crashes."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from common.messages.generation import SamplingParams
from router.dispatch import suspects as module
from router.dispatch.generation import GenerationRequest
from router.dispatch.suspects import Suspects, fingerprint
from tests.fakes.clock import Clock


def keys(*names: str) -> dict[bytes, int]:
    return {name.encode(): 0 for name in names}


def made() -> Suspects:
    return Suspects(600.0, Clock(), 2)


def test_what_is_quarantined_already_is_to_blame_again() -> None:
    """Copies of the request were on other nodes when it was convicted."""
    suspects = Suspects(300.0, Clock(), 2)
    assert suspects.crashed("a", "decode", {b"poison": 0}) is None
    assert suspects.crashed("b", "decode", {b"poison": 0}) == b"poison"
    assert suspects.crashed("c", "decode", {b"poison": 0, b"other": 0}) == b"poison"
    assert not suspects.is_suspect(b"other")
    suspects.returned("c")
    assert suspects.is_quarantined(b"poison"), "the loss of a connection takes back one crash, not all"


def test_a_table_with_a_quarantined_request_only_is_not_empty() -> None:
    """Otherwise fingerprints would not be computed, and the request would be let in again."""
    suspects = made()
    assert suspects.empty
    assert (suspects.crashes(b"poison"), suspects.needs_isolation(b"poison")) == (0, False)
    suspects.crashed("a", "decode", {b"poison": 0})
    suspects.crashed("b", "decode", {b"poison": 0})
    assert (len(suspects), suspects.quarantined, suspects.empty) == (0, 1, False)
    suspects.progressed(b"another", 10_000)
    assert suspects.is_quarantined(b"poison")


def test_each_crash_of_a_copy_prolongs_the_quarantine() -> None:
    clock = Clock()
    suspects = Suspects(300.0, clock, 2)
    for node in ("a", "b"):
        suspects.crashed(node, "decode", {b"poison": 0})
    clock.now += 200.0
    assert suspects.crashed("c", "decode", {b"poison": 0}) == b"poison"
    clock.now += 200.0
    assert suspects.is_quarantined(b"poison")
    clock.now += 100.0
    assert not suspects.is_quarantined(b"poison")


def test_a_request_that_was_the_only_suspect_twice_is_quarantined() -> None:
    table = made()
    assert table.empty
    assert table.crashed("n0", "decode", keys("a")) is None
    assert table.is_suspect(b"a")
    assert not table.needs_isolation(b"a")
    assert table.crashed("n1", "decode", keys("a", "b", "c")) == b"a", "b and c were not there the first time"
    assert table.is_quarantined(b"a")
    assert not table.is_suspect(b"b")
    assert (len(table), table.quarantined) == (0, 1)


def test_suspects_that_crash_together_are_tried_one_at_a_time() -> None:
    table = made()
    assert table.crashed("n0", "decode", keys("a", "b", "c")) is None
    assert table.crashed("n1", "decode", keys("a", "b", "d")) is None
    assert table.needs_isolation(b"a")
    assert table.needs_isolation(b"b")
    assert not table.needs_isolation(b"c")
    assert not table.is_suspect(b"d"), "the crash is explained"
    assert table.crashed("n2", "decode", keys("b", "c", "d")) == b"b", "it has the most crashes of all"


def test_a_request_that_gets_past_the_crash_is_cleared() -> None:
    table = made()
    table.crashed("n0", "decode", {b"a": 100, b"b": 100})
    table.progressed(b"a", 107)
    assert table.is_suspect(b"a")
    table.progressed(b"a", 108)
    table.completed(b"b")
    assert table.empty


def test_a_prefill_node_is_not_crashed_by_a_request_that_it_has_handed_over() -> None:
    table = made()
    table.crashed("n0", "prefill", keys("a"))
    table.crashed("n1", "decode", keys("b"))
    table.prefilled(b"a")
    table.prefilled(b"b")
    assert not table.is_suspect(b"a")
    assert table.is_suspect(b"b")


def test_crashes_of_different_roles_do_not_add_up() -> None:
    table = made()
    table.crashed("n0", "prefill", keys("a"))
    assert table.crashed("n1", "decode", keys("a")) is None
    assert table.crashed("n2", "decode", keys("a")) == b"a"


def test_a_process_that_comes_back_has_not_crashed() -> None:
    table = made()
    table.crashed("n0", "decode", keys("a"))
    table.crashed("n1", "decode", keys("a", "b"))
    assert table.is_quarantined(b"a")
    table.returned("n1")
    assert not table.is_quarantined(b"a")
    assert table.is_suspect(b"a"), "of the first crash"
    table.returned("n0")
    table.returned("n0")
    assert table.empty


def test_everything_expires() -> None:
    clock = Clock()
    table = Suspects(600.0, clock, 2)
    table.crashed("n0", "decode", keys("a", "b"))
    table.crashed("n1", "decode", keys("a"))
    clock.now += 600
    assert not table.is_quarantined(b"a")
    assert not table.is_suspect(b"b")
    assert table.crashed("n2", "decode", keys("a", "b")) is None


def test_tables_are_bounded() -> None:
    table = made()
    for n in range(module.MAX_QUARANTINED + 10):
        key = {str(n).encode(): 0}
        table.crashed(f"x{n}", "decode", key)
        table.crashed(f"y{n}", "decode", key)
    assert table.quarantined == module.MAX_QUARANTINED
    assert not table.is_quarantined(b"0")
    table.crashed("z", "decode", {f"s{n}".encode(): 0 for n in range(2 * module.MAX_SUSPECTS)})
    assert len(table) == module.MAX_SUSPECTS
    assert len(table.presumed_crashed()) == module.RECENT_CRASHES


@settings(deadline=None)
@given(st.integers(1, 60), st.integers(0, 3), st.integers(1, 6), st.integers(0, 2**32))
def test_only_poison_is_quarantined_and_crashes_are_bounded(
    innocents: int, poisons: int, nodes: int, seed: int
) -> None:
    """A model of the fleet: requests run on random nodes, poison crashes its node, isolation is obeyed."""
    draw = random.Random(seed)
    table = made()
    bad = {f"poison-{n}".encode() for n in range(poisons)}
    running = bad | {f"innocent-{n}".encode() for n in range(innocents)}
    crashes = 0
    while running:
        isolated = [key for key in running if table.needs_isolation(key)]
        tried = set(isolated[:1]) or running  # one at a time, if there are any
        placed: dict[int, list[bytes]] = {}
        for key in sorted(tried):
            placed.setdefault(draw.randrange(nodes), []).append(key)
        for node, aboard in placed.items():
            if bad.isdisjoint(aboard):
                for key in aboard:
                    table.completed(key)
                running -= set(aboard)
                continue
            crashes += 1
            convicted = table.crashed(f"{node}-{crashes}", "decode", dict.fromkeys(aboard, 0))
            if convicted is not None:
                assert convicted in bad
                running.discard(convicted)
    assert table.quarantined == poisons
    # Together, together, isolated for the first; the nodes of one round may each crash under others.
    assert crashes <= 3 * poisons
    assert crashes >= 2 * bool(poisons)


def test_the_fingerprint() -> None:
    request = GenerationRequest("r", [1, 2, 3], SamplingParams(max_tokens=5, seed=7))
    same = replace(request, request_id="s", sampling=msgspec.structs.replace(request.sampling, seed=8))
    assert fingerprint(request) == fingerprint(same)
    for other in (
        replace(request, token_ids=[1, 2, 4]),
        replace(request, sampling=msgspec.structs.replace(request.sampling, max_tokens=6)),
    ):
        assert fingerprint(other) != fingerprint(request)


@pytest.mark.parametrize(("max_crashes", "convicting"), [(2, 2), (4, 4), (0, None)])
def test_how_many_crashes_convict_is_configured(max_crashes: int, convicting: int | None) -> None:
    suspects = Suspects(300.0, Clock(), max_crashes)
    verdicts = [suspects.crashed(str(number), "decode", {b"poison": 0}) for number in range(6)]
    first = next((number + 1 for number, verdict in enumerate(verdicts) if verdict is not None), None)
    assert first == convicting
