"""Bad frames are counted per peer and logged at a bounded rate; their sender is disconnected, others are served."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from common.ipc import Dealer, RouterSocket
from common.ipc.bad_frames import LIMIT, MAX_PEERS, WINDOW, BadFrames, peer_of
from common.ipc.curve import Curve
from common.ipc.identity_check import BAN_SECONDS
from common.ipc.key_files import make_key_pairs
from common.observability import bounded_log
from common.observability.bounded_log import FIRST, BoundedLog
from common.observability.logs import Log
from tests.fakes.clock import Clock
from tests.fakes.held_context import Context
from tests.fakes.waiting import until


@pytest.fixture
def context() -> Iterator[Context]:
    made = Context()
    yield made
    made.destroy(linger=0)


def counter(clock: Clock) -> BadFrames:
    return BadFrames(BoundedLog(Log("test"), "refused", clock), clock)


def test_a_peer_is_cut_off_at_the_limit_and_no_other() -> None:
    bad = counter(Clock())
    assert [bad.count("a/1", "x") for _ in range(LIMIT)] == [False] * (LIMIT - 1) + [True]
    assert bad.is_cut_off("a/1")
    assert not bad.is_cut_off("a/2")
    assert not bad.count("a/1", "x"), "the limit is reported once"
    assert not bad.count("b/1", "x")


def test_bad_frames_now_and_then_are_no_reason() -> None:
    clock = Clock()
    bad = counter(clock)
    for _ in range(20 * LIMIT):
        assert not bad.count("a/1", "x")
        clock.now += 2 * WINDOW / LIMIT


def test_the_tables_are_bounded() -> None:
    bad = counter(Clock())
    for number in range(3 * MAX_PEERS):
        for _ in range(LIMIT if number % 2 else 1):
            bad.count(f"n/{number}", "x")
    assert sum(bad.is_cut_off(f"n/{number}") for number in range(3 * MAX_PEERS)) == MAX_PEERS


def test_the_peer_that_was_silent_longest_is_forgotten_first() -> None:
    bad = counter(Clock())
    for peer in ("forgotten", "heard again"):
        for _ in range(LIMIT - 1):
            bad.count(peer, "x")
    for number in range(MAX_PEERS - 2):
        bad.count(f"n/{number}", "x")
    assert bad.count("heard again", "x"), "as many as fit are remembered"
    bad.count("one more", "x")
    assert not bad.count("forgotten", "x"), "it is counted from the beginning"


@pytest.mark.parametrize(
    ("routing_id", "peer"),
    [
        (b"n/1", "n/1"),
        (b"n/1/beat", "n/1"),
        (b"n/1/a/b", "n/1"),
        (b"n", "n"),
        (b"", ""),
        (b"\x00\xff", "\x00\ufffd"),
        (b"x" * 255, "x" * 128),
    ],
)
def test_the_links_of_a_process_are_one_peer(routing_id: bytes, peer: str) -> None:
    assert peer_of(routing_id) == peer


def test_a_flood_writes_a_few_lines(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    log = BoundedLog(Log("test"), "refused a frame", clock)
    with caplog.at_level(logging.WARNING):
        for number in range(264_000):
            log.warning(f"peer-{number % 1000}", "because")
            clock.now += 20.0 / 264_000
        clock.now += bounded_log.WINDOW
        log.flush()
    assert log.total == 264_000
    assert len(caplog.records) <= 3 * (FIRST + 1)
    summaries = [vars(record)["fields"] for record in caplog.records if "count" in vars(record)["fields"]]
    assert sum(each["count"] for each in summaries) + len(caplog.records) - len(summaries) == 264_000
    assert all(len(each["peers"]) <= bounded_log.MAX_PEERS + 1 for each in summaries)


# -- sockets -----------------------------------------------------------------------------------------------------


def test_garbage_cuts_its_sender_off_and_others_are_heard(context: Context, tmp_path: Path) -> None:
    server = RouterSocket(context, f"ipc://{tmp_path}/r.sock")
    honest = Dealer(context, server.address, b"decode-0/1")
    liar = context.socket(zmq.DEALER)
    liar.setsockopt(zmq.IDENTITY, b"decode-1/1")
    liar.connect(server.address)
    for number in range(LIMIT):
        parts = [os.urandom(48), os.urandom(20)] if number % 2 else [b"a", b"b", b"c"]
        liar.send_multipart(parts)
    until(lambda: server.drain() or server.bad.total == LIMIT)
    assert server.take_cut_off() == ["decode-1/1"]
    assert server.take_cut_off() == []
    liar.send_multipart([b"a datagram, which is no bad frame"])
    honest.send(b"fine")
    assert until(server.drain) == [(b"decode-0/1", b"fine")]
    fresh = Dealer(context, server.address, b"decode-1/2")
    fresh.send(b"a new process")
    assert until(server.drain) == [(b"decode-1/2", b"a new process")]


def test_a_key_that_claims_other_names_is_banned_for_a_while(tmp_path: Path) -> None:
    """The name that it claims is not blamed, and its own name is accepted again after the ban."""
    keys = tmp_path / "keys"
    make_key_pairs(keys, ["router", "decode-0", "prefill-0"])
    contexts = [Context() for _ in range(3)]
    clock = Clock()
    ours, theirs, honest = (
        Curve(context, keys, name, ["decode-0", "prefill-0"], clock)
        for context, name in zip(contexts, ("router", "decode-0", "prefill-0"), strict=True)
    )
    try:
        server = RouterSocket(contexts[0], "tcp://127.0.0.1:*", ours)
        forger = Dealer(contexts[1], server.address, b"prefill-0/1", "router", theirs, opens=False)
        for _ in range(LIMIT):
            assert forger.datagram(b"I am prefill-0")
        until(lambda: server.drain() or server.bad.total == LIMIT)
        assert server.take_cut_off() == ["decode-0"]
        own = Dealer(contexts[1], server.address, b"decode-0/1", "router", theirs)
        own.send(b"refused during the ban")
        other = Dealer(contexts[2], server.address, b"prefill-0/1", "router", honest)
        other.send(b"fine")
        assert until(server.drain) == [(b"prefill-0/1", b"fine")]
        clock.now += BAN_SECONDS + 1

        def heard() -> list[tuple[bytes, bytes]]:
            own.drain()
            return server.drain()

        assert until(heard) == [(b"decode-0/1", b"refused during the ban")]
    finally:
        for each in (ours, theirs, honest):
            each.close()
        for each_context in contexts:
            each_context.destroy(linger=0)


def test_thousands_of_unknown_routing_ids_leave_no_sessions(context: Context, tmp_path: Path) -> None:
    """A session begins with a frame of the peer: nothing is kept for routing ids that only send bad ones."""
    server = RouterSocket(context, f"ipc://{tmp_path}/r.sock")
    for batch in range(30):
        strangers = []
        for number in range(100):
            strangers.append(context.socket(zmq.DEALER))
            strangers[-1].setsockopt(zmq.IDENTITY, b"x%d/%d" % (batch, number))
            strangers[-1].connect(server.address)
            strangers[-1].send_multipart([b"a", b"b", b"c"])
        until(functools.partial(reads, server, 100 * (batch + 1)))
        for stranger in strangers:
            stranger.close(linger=0)
        context.made.clear()
    assert not any(server.post(b"x%d/%d" % (batch, each), b"") for batch in range(30) for each in range(100))


def reads(server: RouterSocket, refused: int) -> bool:
    server.drain()
    return server.bad.total >= refused
