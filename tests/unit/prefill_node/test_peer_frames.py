"""A decode node that sends garbage to a prefill node is counted and disconnected; accepted ones stay."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from common.ipc import Dealer, RouterSocket, sessions
from common.ipc.bad_frames import LIMIT
from kv_transfer.sender import Sender
from prefill_node.peer_frames import take_peer_frames
from tests.fakes.held_context import Context
from tests.fakes.waiting import until


def test_garbage_of_a_decode_node_is_counted_until_it_is_cut_off(tmp_path: Path) -> None:
    context = Context()
    handled: list[tuple[bytes, bytes]] = []
    counters = SimpleNamespace(malformed=0, handshakes=0)

    def handle(peer: bytes, frame: bytes) -> None:
        handled.append((peer, frame))
        counters.malformed += frame == b"garbage"

    sender = cast(Sender, SimpleNamespace(counters=counters, handle=handle))
    try:
        peers = RouterSocket(context, f"ipc://{tmp_path}/p.sock")
        liar = Dealer(context, peers.address, b"decode-0/1/p", opens=False)
        honest = Dealer(context, peers.address, b"decode-1/1/p", opens=False)
        for _ in range(LIMIT):
            assert liar.datagram(b"garbage")
        until(lambda: take_peer_frames(peers, sender) or peers.bad.total == LIMIT)
        assert liar.datagram(b"ignored")
        assert honest.datagram(b"hello")
        until(lambda: take_peer_frames(peers, sender) or (b"decode-1/1/p", b"hello") in handled)
        assert (b"decode-0/1/p", b"ignored") not in handled
    finally:
        context.destroy(linger=0)


def test_strangers_do_not_push_out_a_decode_node_that_was_welcomed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "MAX_SESSIONS", 3)
    context = Context()
    counters = SimpleNamespace(malformed=0, handshakes=0)
    known: list[bytes] = []
    heard: list[tuple[bytes, bytes]] = []

    def handle(peer: bytes, frame: bytes) -> None:
        heard.append((peer, frame))
        if frame == b"hello":
            counters.handshakes += 1
            known.append(peer)

    table = SimpleNamespace(identities=lambda: known)
    sender = cast(Sender, SimpleNamespace(counters=counters, handle=handle, peers=table))
    try:
        peers = RouterSocket(context, f"ipc://{tmp_path}/p.sock")
        welcomed = Dealer(context, peers.address, b"decode-0/1/p")
        assert welcomed.send(b"hello")
        until(lambda: take_peer_frames(peers, sender) or known)
        for number in range(8):
            stranger = Dealer(context, peers.address, f"stranger-{number}/1/p".encode())
            assert stranger.send(b"knock")
            until(lambda number=number: take_peer_frames(peers, sender) or len(heard) == number + 2)  # type: ignore[misc]
        known_strangers = [n for n in range(8) if peers.post(f"stranger-{n}/1/p".encode(), b"answer")]
        assert known_strangers == [6, 7], "two sessions beside the decode node's"
        assert peers.post(b"decode-0/1/p", b"pages are written"), "its session is still there"
        assert until(welcomed.drain) == [b"pages are written"]
    finally:
        context.destroy(linger=0)
