"""What a process holds is counted, and what it holds beyond its start is named."""

from __future__ import annotations

import os
import re
import socket
from contextlib import closing
from dataclasses import replace

import pytest

from tests.chaos.leaks import SPARE, Held, Holdings, differences, held_by, owner

USUAL = Held({"socket": 5, "file": 4}, 1, {"20000 -> *": 2})
BEFORE = Holdings({"decode-0": USUAL}, frozenset({"tandem.0.1.42.7.ab.kv"}), frozenset({"router.sock"}))


def with_held(held: Held) -> Holdings:
    return replace(BEFORE, processes={"decode-0": held})


def test_the_sockets_of_this_process_are_counted() -> None:
    before = held_by(os.getpid())
    assert before is not None
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        with closing(socket.create_connection(server.getsockname())), closing(server.accept()[0]):
            now = held_by(os.getpid())
            assert now is not None
            assert now.descriptors["socket"] == before.descriptors.get("socket", 0) + 3
            assert sum(now.connections.values()) >= 3


def test_a_process_that_has_ended_holds_nothing() -> None:
    assert held_by(2**22 + 1) is None


@pytest.mark.parametrize(
    ("after", "words"),
    [
        (BEFORE, None),
        (with_held(Held({"socket": 5 + SPARE, "file": 4}, 1, {})), None),
        (
            with_held(Held({"socket": 9, "file": 4}, 1, {"20000 -> *": 6})),
            "13 open descriptors, 9 before.*'20000 -> \\*': 4",
        ),
        (with_held(replace(USUAL, segments=2)), "maps 2 segments"),
        (replace(BEFORE, processes={}), "has ended by itself"),
        (replace(BEFORE, segments=BEFORE.segments | {"tandem.0.1.43.7.ab.kv"}), "no process needs"),
        (replace(BEFORE, sockets=BEFORE.sockets | {"old.sock"}), "run directory.*old.sock"),
    ],
    ids=["nothing", "spare", "sockets", "mapped", "ended", "segments", "files"],
)
def test_what_was_not_held_before_is_named(after: Holdings, words: str | None) -> None:
    found = "\n".join(differences(BEFORE, after))
    if words is None:
        assert found == ""
    else:
        assert found
        assert re.search(words, found)


def test_a_segment_names_its_owner() -> None:
    assert owner("tandem.0.4026531836.42.777.ab.kv") == 42
    assert owner("sem.other") == owner("tandem.x") == 0
