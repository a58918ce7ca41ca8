"""Fuzz targets for what peers send: control messages, KV transfer messages, records, frames of sessions and of TCP."""

from __future__ import annotations

import struct
from contextlib import suppress
from functools import partial
from typing import Any

import xxhash

from common.errors import ProtocolError, RecordError
from common.ipc import session
from common.messages import decode_inbox, image_inbox, prefill_inbox, router_inbox, wire
from common.messages.generation import SamplingParams
from common.messages.identity import NodeRef, name_in, routing_id
from common.node_names import NodeNames, is_pattern
from kv_transfer import handoff_record, messages
from kv_transfer.transport.base import Region
from kv_transfer.transport.tcp import frames as tcp_frames
from router.nodes.message_sender import MessageSender
from tests.fuzz.target import Target

INCARNATION = "a" * 32
ROOM, GENERATION, SLOT = 5, 7, 4096
MAX_FRAME = 1 << 20


def inbox(codec: wire.InboxCodec[Any], data: bytes) -> None:
    """Decoding gives a message that can be encoded again, or raises ProtocolError."""
    with suppress(ProtocolError):
        again = wire.encode(codec.decode(data))
        assert wire.encode(codec.decode(again)) == again


def kv_messages(data: bytes) -> None:
    """Feed the bytes as they are, and after a valid envelope."""
    envelope = messages.encode(
        messages.AbortTransfer(room=1, generation=2, code="x", reason="r"), INCARNATION
    )[: messages._ENVELOPE.size]
    for frame in (data, envelope + data):
        for decode in (messages.decode_for_sender, messages.decode_for_receiver):
            with suppress(ProtocolError):
                decode(frame)


def record(data: bytes) -> None:
    """Decode the bytes as they are, and as the payload of a record whose header, hash and trailer are right."""
    header = handoff_record._HEADER.pack(
        handoff_record.MAGIC, handoff_record.VERSION, len(data), ROOM, GENERATION
    )
    digest = struct.pack("<Q", handoff_record._digest(header, data))
    for buffer in (data, b"".join((header, digest, data, struct.pack("<Q", GENERATION)))):
        with suppress(RecordError):
            handoff_record.decode(buffer, ROOM, GENERATION)


def tcp_frame(data: bytes) -> None:
    """Parse the bytes as a header, as they are and with a correct hash: what is accepted packs to the same bytes."""
    size = tcp_frames.HEADER_BYTES
    body = data[: size - 8].ljust(size - 8, b"\0")
    for header in (
        data[:size].ljust(size, b"\0"),
        body + struct.pack("<Q", xxhash.xxh3_64_intdigest(body)),
    ):
        with suppress(tcp_frames.Violation):
            frame = tcp_frames.unpack(header, MAX_FRAME)
            assert tcp_frames.pack(frame) == header
            assert 0 < frame.nbytes <= MAX_FRAME


def session_frame(data: bytes) -> None:
    with suppress(ProtocolError):
        session.read_header(data[: session.HEADER.size], data[session.HEADER.size :])


def routing_ids(data: bytes) -> None:
    """Parse the bytes as the routing id of a message, with patterns: a name has one entry, and a pattern is no name."""
    names = NodeNames.of(ENTRIES)
    name = name_in(data)
    entry = names.entry(name)
    assert entry in (None, *ENTRIES)
    assert not is_pattern(name) or entry is None
    assert names.shares_key(name) or names.key_of(name) == name
    with suppress(ProtocolError, UnicodeDecodeError):
        sender = MessageSender.of(data)
        assert routing_id(
            sender.name, sender.incarnation, *([sender.link] if sender.link else [])
        ).encode() in (
            data,
            data.removesuffix(b"/"),
        )


ENTRIES = ("prefill-0", "prefill-*", "decode-*")
NODE = NodeRef(name="prefill-0", role="prefill", incarnation=INCARNATION, peer_address="ipc:///run/p.sock")
SAMPLING = SamplingParams(max_tokens=4, stop_token_ids=(1, 2), logit_bias=((5, 1.5),))
PREFILL = prefill_inbox.Prefill(
    room=1, request_id="q", token_ids=[1, 2], emitted=0, sampling=SAMPLING, decode="d", deadline_ms=5
)
RESERVE = decode_inbox.Reserve(
    room=5, request_id="q", token_ids=[], emitted=0, sampling=SAMPLING, prefill=NODE, deadline_ms=500
)
FAILED = router_inbox.Failed(room=1, code="transfer_failed", message="no")
RECORD = handoff_record.HandoffRecord(first_token=3, num_tokens=40, checksums=b"\0" * 24)
FRAME = tcp_frames.pack(tcp_frames.Frame(Region.KV, 3, 64, 128))

TARGETS = {
    "router-inbox": Target(partial(inbox, router_inbox.codec), (wire.encode(FAILED),)),
    "prefill-inbox": Target(partial(inbox, prefill_inbox.codec), (wire.encode(PREFILL),)),
    "decode-inbox": Target(partial(inbox, decode_inbox.codec), (wire.encode(RESERVE),)),
    "image-inbox": Target(partial(inbox, image_inbox.codec), (b"\x82\xa4type\xa9ImageData",)),
    "kv-messages": Target(
        kv_messages,
        (
            messages.encode(
                messages.AbortTransfer(room=1, generation=2, code="x", reason="gone"), INCARNATION
            ),
        ),
    ),
    "handoff-record": Target(record, (handoff_record.encode(RECORD, ROOM, GENERATION, SLOT),)),
    "tcp-frame": Target(tcp_frame, (FRAME,)),
    "routing-ids": Target(
        routing_ids, (f"decode-7/{INCARNATION}/s-beat".encode(), b"decode-*/x", b"prefill-0/y/")
    ),
    "session-frame": Target(
        session_frame, (b"".join(session.frame(session.FrameKind.DATA, 1, 2, 3, b"payload")),)
    ),
}
