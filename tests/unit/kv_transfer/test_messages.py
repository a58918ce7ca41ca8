"""Frames survive round trips; a refusal needs only the envelope, and anything else raises ProtocolError."""

from __future__ import annotations

import contextlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import HandshakeRefused, ProtocolError
from kv_transfer import messages
from kv_transfer.messages import (
    KV_PROTOCOL_VERSION,
    AbortAck,
    AbortTransfer,
    Hello,
    PagesWritten,
    RecordWritten,
    Refused,
    SenderFailed,
    Slots,
    ToReceiver,
    ToSender,
    Welcome,
    decode_for_receiver,
    decode_for_sender,
    encode,
)
from kv_transfer.transport.description import to_wire
from kv_transfer.transport.one_host.process import ProcessIdentity
from kv_transfer.transport.shm.kind import ShmDescription
from kv_transfer.transport.tcp.kind import TcpDescription
from tests.unit.kv_transfer.rig import layout

ME = "0123456789abcdef" * 2
PROCESS = ProcessIdentity("boot/1", 12, 345)
u63 = st.integers(0, 2**63 - 1)
u32 = st.integers(0, 2**32 - 1)

for_sender: st.SearchStrategy[ToSender] = st.one_of(
    st.builds(
        Hello,
        st.text(min_size=1, max_size=20),
        st.just(layout()),
        st.sampled_from([ShmDescription("a", "b", PROCESS), TcpDescription("h", 1, bytes(32))]).map(to_wire),
        u32,
        u32,
    ),
    st.builds(Slots, u63, u63, st.lists(u32, max_size=20).map(tuple), u32, u32, st.none() | u63),
    st.builds(AbortTransfer, u63, u63, st.text(max_size=60), st.text(max_size=50)),
)
for_receiver: st.SearchStrategy[ToReceiver] = st.one_of(
    st.builds(Welcome, st.text(min_size=1, max_size=20), st.just(PROCESS)),
    st.builds(Refused, st.text(max_size=50)),
    st.builds(PagesWritten, u63, u63, u32, u32),
    st.builds(RecordWritten, u63, u63, u32),
    st.builds(SenderFailed, u63, u63, st.text(max_size=60), st.text(max_size=50)),
    st.builds(AbortAck, u63, u63),
)


@given(for_sender)
def test_sender_inbox_round_trip_and_only_there(message: ToSender) -> None:
    frame = encode(message, ME)
    assert decode_for_sender(frame) == (ME, message)
    with pytest.raises(ProtocolError):
        decode_for_receiver(frame)


@given(for_receiver)
def test_receiver_inbox_round_trip_and_only_there(message: ToReceiver) -> None:
    frame = encode(message, ME)
    assert decode_for_receiver(frame) == (ME, message)
    with pytest.raises(ProtocolError):
        decode_for_sender(frame)


def _decode_or_refuse(frame: bytes) -> None:
    for decode in (decode_for_sender, decode_for_receiver):
        with contextlib.suppress(ProtocolError):
            decode(frame)


@given(st.binary(max_size=200))
def test_noise_is_a_protocol_error(noise: bytes) -> None:
    _decode_or_refuse(noise)
    _decode_or_refuse(encode(Refused(""), ME)[:32] + noise)


@given(st.one_of(for_sender, for_receiver), st.data())
def test_damaged_frames_are_protocol_errors(message: ToSender | ToReceiver, data: st.DataObject) -> None:
    frame = bytearray(encode(message, ME))
    _decode_or_refuse(bytes(frame[: data.draw(st.integers(0, len(frame)))]))
    for _ in range(3):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    _decode_or_refuse(bytes(frame))


def test_bounds_hold() -> None:
    with pytest.raises(ProtocolError, match="limit is"):
        decode_for_sender(bytes(messages.MAX_FRAME_BYTES + 1))
    huge = encode(Slots(1, 1, (0,) * (messages.MAX_PAGES + 1), 0, 0), ME)
    with pytest.raises(ProtocolError):
        decode_for_sender(huge)
    assert len(encode(Slots(1, 1, (2**32 - 1,) * messages.MAX_PAGES, 0, 0), ME)) < messages.MAX_FRAME_BYTES
    deep = encode(Refused(""), ME)[:32] + b"\x91" * 100_000
    with pytest.raises(ProtocolError):
        decode_for_sender(deep)


def test_another_version_is_refused_before_its_body_is_read() -> None:
    frame = bytearray(encode(Refused("x"), ME))
    struct.pack_into("<H", frame, 4, 9)
    with pytest.raises(
        HandshakeRefused, match=f"speaks KV protocol 9, this node speaks {KV_PROTOCOL_VERSION}; run the same"
    ):
        decode_for_sender(bytes(frame[:32]) + b"a body of another age")
    frame = bytearray(encode(Refused("x"), ME))
    frame[8] ^= 1
    with pytest.raises(HandshakeRefused, match="message schema is"):
        decode_for_receiver(bytes(frame))
