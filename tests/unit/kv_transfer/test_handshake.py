"""Hello and Welcome: which pairs are refused with which error, and what a restarted node does to its predecessor."""

from __future__ import annotations

import errno
import os
import secrets
import struct

import msgspec
import pytest

from common.errors import NodeLost, Overloaded, Unavailable
from common.kv_cache.pool_layout import PoolLayout
from common.node import announced_work
from kv_transfer import messages
from kv_transfer.events import PagesFree, PeerRefused, RoomFailed, SlotsGranted, TransferLost
from kv_transfer.inbound import MAX_GREETING
from kv_transfer.messages import Slots
from kv_transfer.transport.base import PeerMemory, Target
from kv_transfer.transport.shm.sender import ShmSender
from kv_transfer.transport.tcp.sender import TcpSender
from tests.fakes.loopback import Fabric, LoopbackSender
from tests.fakes.pools import layers_layout
from tests.unit.kv_transfer.rig import LIMITS, Clock, Decode, Prefill, layout, send_all


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def fabric(clock: Clock) -> Fabric:
    return Fabric(clock)


@pytest.fixture
def prefill(clock: Clock, fabric: Fabric) -> Prefill:
    incarnation = secrets.token_hex(16)
    return Prefill(clock, fabric.sender(incarnation), incarnation=incarnation)


def decode_node(
    fabric: Fabric, clock: Clock, shape: PoolLayout | None = None, node: str = "decode-0"
) -> Decode:
    incarnation = secrets.token_hex(16)
    return Decode(clock, fabric.receiver(incarnation), shape=shape, node=node, incarnation=incarnation)


def refusal(decode: Decode, prefill: Prefill) -> str:
    decode.connect(prefill)
    (event,) = decode.poll()
    assert isinstance(event, PeerRefused)
    assert event.incarnation == prefill.incarnation
    return event.reason


def test_a_name_with_a_shared_key_stays_with_the_process_that_lives(fabric: Fabric, clock: Clock) -> None:
    """Another process with the key of the pattern cannot drop a living node's transfers by saying Hello in its name."""
    living: set[bytes] = set()
    incarnation = secrets.token_hex(16)
    prefill = Prefill(
        clock, fabric.sender(incarnation), incarnation=incarnation, keeps_name=living.__contains__
    )
    first = decode_node(fabric, clock, node="decode-7")
    first.connect(prefill)
    living.add(first.identity)
    other = decode_node(fabric, clock, node="decode-7")
    assert "another process is decode node decode-7" in refusal(other, prefill)
    assert prefill.sender.peers.identities() == [first.identity]
    assert prefill.sender.counters.refused == {"name": 1}
    living.clear()
    successor = decode_node(fabric, clock, node="decode-7")
    successor.connect(prefill)
    assert prefill.sender.peers.identities() == [successor.identity]


@pytest.mark.parametrize(
    ("shape", "cause", "words"),
    [
        (layout(fingerprint="other"), "layout", ["decode-0", "model differs", "tiny", "other"]),
        (layout(page_size=4), "layout", ["page size differs", "set the same kv.page_size"]),
        (layout(dtype="bfloat16"), "layout", ["KV dtype of target layer 0 k differs"]),
        # One node drafts and the other does not: the draft's planes follow the target's.
        (layers_layout("tiny", "float32", 2, 16, [(2, 4)] * 3), "layout", ["decode-0"]),
    ],
)
def test_refused_layouts(
    fabric: Fabric, clock: Clock, prefill: Prefill, shape: PoolLayout, cause: str, words: list[str]
) -> None:
    decode = decode_node(fabric, clock, shape)
    sentence = refusal(decode, prefill)
    assert all(word in sentence for word in words), sentence
    assert prefill.sender.counters.refused == {cause: 1}
    assert decode.receiver.counters.refused == 1


@pytest.mark.parametrize(
    ("endpoint", "words"),
    [(ShmSender(), "this prefill node sends by shm"), (TcpSender(LIMITS), "this prefill node sends by tcp")],
)
def test_refused_transports(
    fabric: Fabric, clock: Clock, endpoint: ShmSender | TcpSender, words: str
) -> None:
    sentence = refusal(decode_node(fabric, clock), Prefill(clock, endpoint))
    assert "it takes pages by loopback" in sentence
    assert words in sentence


def test_a_prefill_node_without_free_descriptors_refuses_until_there_are_some(
    fabric: Fabric, clock: Clock, prefill: Prefill, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exhausted(self: LoopbackSender, target: Target) -> PeerMemory:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    decode = decode_node(fabric, clock)
    with monkeypatch.context() as patch:
        patch.setattr(LoopbackSender, "attach", exhausted)
        sentence = refusal(decode, prefill)
    assert "this prefill node has too few resources now (Too many open files)" in sentence, sentence
    assert "ulimit -Hn" in sentence, sentence
    assert prefill.sender.counters.refused == {"resources": 1}, "it matches this node"
    decode.connect(prefill)
    assert prefill.sender.counters.handshakes == 1


def test_another_version_is_reported_by_both_sides(fabric: Fabric, clock: Clock, prefill: Prefill) -> None:
    decode = decode_node(fabric, clock)

    def from_the_future(frame: bytes) -> None:
        altered = bytearray(frame)
        struct.pack_into("<H", altered, 4, 9)
        prefill.sender.handle(decode.identity, bytes(altered[:32]) + b"unknown body")

    decode.connect(prefill, from_the_future)
    (event,) = decode.poll()
    assert isinstance(event, PeerRefused)
    assert f"speaks KV protocol 9, this node speaks {messages.KV_PROTOCOL_VERSION}" in event.reason
    # The other direction: an answer of another version.
    again = decode_node(fabric, clock)
    again.connect(prefill, lambda frame: None)
    answer = bytearray(messages.encode(messages.Refused("?"), prefill.incarnation))
    struct.pack_into("<H", answer, 4, 8)
    again.receiver.handle(prefill.incarnation, bytes(answer))
    (event,) = again.poll()
    assert isinstance(event, PeerRefused)
    assert "speaks KV protocol 8" in event.reason


def test_slots_before_hello_ask_for_it_and_abort_is_acknowledged(prefill: Prefill) -> None:
    stranger = secrets.token_hex(16)
    prefill.sender.handle(b"x", messages.encode(Slots(1, 1, (1,), 0, 0), stranger))
    prefill.sender.handle(b"x", messages.encode(messages.AbortTransfer(1, 1, "c", "r"), stranger))
    said = [messages.decode_for_receiver(frame)[1] for _, frame in prefill.sent]
    assert said == [messages.HelloNeeded(), messages.AbortAck(1, 1)]
    assert prefill.sender.counters.ungreeted_slots == 1


@pytest.mark.parametrize("connected", [False, True])
def test_slots_wait_for_welcome_and_a_silent_peer_times_out(
    fabric: Fabric, clock: Clock, prefill: Prefill, connected: bool
) -> None:
    decode = decode_node(fabric, clock)
    heard: list[bytes] = []
    decode.connect(prefill, heard.append)
    decode.receiver.open(1, (prefill.incarnation,), [1], 0)
    assert len(heard) == 1  # only Hello
    begun = clock.now
    while connected and clock.now - begun < MAX_GREETING - 10:
        clock.now += LIMITS.handshake_timeout - 1
        decode.receiver.link_works(prefill.incarnation)
        assert not decode.poll(), "its process is connected: its loop is busy"
    clock.now += LIMITS.handshake_timeout
    if connected:
        decode.receiver.link_works(prefill.incarnation)
    refused, failed, free = decode.poll()
    assert isinstance(refused, PeerRefused)
    assert f"did not answer Hello within {clock.now - begun:.0f} s" in refused.reason
    assert isinstance(failed, RoomFailed)
    assert free == PagesFree(1, (1,))  # nobody was told of them
    with pytest.raises(Unavailable):
        decode.receiver.open(2, (prefill.incarnation,), [1], 0)
    decode.connect(prefill)
    decode.pump()
    decode.receiver.open(2, (prefill.incarnation,), [1], 0)


def test_a_greeting_outlasts_the_longest_launch() -> None:
    """A prefill node answers after a launch that it has announced to its router, which does not give it up either."""
    assert MAX_GREETING >= announced_work.MAX_SECONDS


def test_another_incarnation_at_the_address_is_refused(
    fabric: Fabric, clock: Clock, prefill: Prefill
) -> None:
    decode = decode_node(fabric, clock)
    believed = secrets.token_hex(16)
    decode.receiver.connect(believed, lambda frame: prefill.sender.handle(decode.identity, frame))
    for _, frame in prefill.sent:
        decode.receiver.handle(believed, frame)
    (event,) = decode.poll()
    assert isinstance(event, PeerRefused)
    assert "another incarnation" in event.reason
    assert decode.receiver.counters.stale_incarnation == 1


def test_a_restarted_decode_node_ends_its_earlier_incarnation(
    fabric: Fabric, clock: Clock, prefill: Prefill
) -> None:
    old = decode_node(fabric, clock)
    old.connect(prefill)
    old.pump()
    old.receiver.open(1, (prefill.incarnation,), [1, 2], 0)
    prefill.sender.expect(1)
    assert prefill.poll() == [SlotsGranted(1)]
    new = decode_node(fabric, clock)
    new.connect(prefill)
    (lost,) = prefill.poll()
    assert lost == TransferLost(1, NodeLost.code, "decode node decode-0 restarted")
    assert new.poll() == []
    # Messages of the old incarnation are dropped and its Hello refused; its aborts are answered.
    stale = prefill.sender.counters
    prefill.sender.handle(old.identity, messages.encode(Slots(2, 9, (1,), 0, 0), old.incarnation))
    assert stale.stale_incarnation == 1
    old.inbox.clear()
    old.connect(prefill)
    refused, failed, free = old.poll()
    assert isinstance(refused, PeerRefused)
    assert "give every decode node its own name" in refused.reason
    assert isinstance(failed, RoomFailed)
    assert free == PagesFree(1, (1, 2))  # the abort over the refused link was acknowledged
    # The new incarnation over the old one's socket identity: frames of the old one are not attributed to it.
    prefill.sender.handle(new.identity, messages.encode(Slots(3, 9, (1,), 0, 0), old.incarnation))
    assert prefill.sender.slots(3) is None
    new.receiver.open(4, (prefill.incarnation,), [1], 0)
    prefill.sender.expect(4)
    assert prefill.poll() == [SlotsGranted(4)]


def test_hello_again_is_harmless(fabric: Fabric, clock: Clock, prefill: Prefill) -> None:
    decode = decode_node(fabric, clock)
    decode.connect(prefill)
    decode.pump()
    decode.receiver.open(1, (prefill.incarnation,), [1], 0)
    prefill.sender.expect(1)
    prefill.poll()
    decode.identity = b"decode-0/another socket"
    decode.connect(prefill)
    decode.pump()
    send_all(prefill, 1, [3])
    decode.pump()
    assert decode.receiver.counters.arrived == 1


def test_peers_are_bounded(fabric: Fabric, clock: Clock) -> None:
    limits = msgspec.structs.replace(LIMITS, max_peers=2)
    prefill = Prefill(clock, fabric.sender("p"), limits)
    for i in range(2):
        decode_node(fabric, clock, node=f"d{i}").connect(prefill)
    assert "max_peers" in refusal(decode_node(fabric, clock, node="d2"), prefill)
    incarnation = secrets.token_hex(16)
    decode = Decode(clock, fabric.receiver(incarnation), limits, incarnation=incarnation)
    for _ in range(2):
        decode.receiver.connect(secrets.token_hex(16), lambda frame: None)
    with pytest.raises(Overloaded):
        decode.receiver.connect(secrets.token_hex(16), lambda frame: None)
    clock.now += 11
    assert len(decode.poll()) == 2  # both refused for their silence
    decode.poll()
    decode.receiver.connect(secrets.token_hex(16), lambda frame: None)


def test_a_lost_decode_node_loses_its_rooms_granted_or_not(
    fabric: Fabric, clock: Clock, prefill: Prefill
) -> None:
    decode = decode_node(fabric, clock)
    decode.connect(prefill)
    decode.pump()
    decode.receiver.open(1, (prefill.incarnation,), [1], 0)
    for room in (1, 2, 3):
        prefill.sender.expect(room, decodes=(decode.incarnation if room < 3 else "",))
    assert prefill.poll() == [SlotsGranted(1)]
    prefill.sender.peer_lost(decode.incarnation)
    assert [(e.room, e.code) for e in prefill.poll() if isinstance(e, TransferLost)] == [
        (1, "node_lost"),
        (2, "node_lost"),
    ]
    assert prefill.sender.active == 1
