"""The messages between the two ends of a transfer: two inboxes, one envelope.

A frame is a fixed envelope followed by one msgpack struct:

    magic 4s | protocol version u16 | reserved u16 | schema hash u64 | incarnation of its process 16s | body

The sender is always the prefill node, which writes the pages; the receiver is the decode node. Messages flow both ways:
`ToSender` holds what the sender is told, `ToReceiver` what the receiver is told.

The envelope never changes, so a peer of any version can be recognised and refused with a reason before its body is
parsed. The incarnation is a random 128-bit value per process, so a frame of an earlier process is recognised and
dropped.
"""

from __future__ import annotations

import struct
from typing import Annotated, Final

import msgspec

from common.errors import HandshakeRefused, ProtocolError
from common.kv_cache.plane import HeadGroup, Plane
from common.kv_cache.pool_layout import MAX_RANKS, PoolLayout, Ranks
from common.kv_cache.pool_spec import PoolSpec
from kv_transfer.schema_hash import schema_hash
from kv_transfer.transport.description import WireDescription
from kv_transfer.transport.one_host.process import ProcessIdentity

MAGIC: Final = b"TKVT"
# Raise it if the meaning of a message changes and its fields do not: changed fields change SCHEMA_HASH.
KV_PROTOCOL_VERSION: Final = 3
MAX_FRAME_BYTES: Final = 8 << 20  # fits Slots of a million pages
MAX_PAGES: Final = 1 << 20  # per request
MAX_BUSY_MS: Final = 3_600_000
MAX_ROOMS: Final = 1 << 16  # per heartbeat

_ENVELOPE: Final = struct.Struct("<4sHHQ16s")

U63 = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
U32 = Annotated[int, msgspec.Meta(ge=0, le=(1 << 32) - 1)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
Code = Annotated[str, msgspec.Meta(max_length=64)]  # common.errors code
Reason = Annotated[str, msgspec.Meta(max_length=4096)]
Rooms = Annotated[tuple[U63, ...], msgspec.Meta(max_length=MAX_ROOMS)]
Address = Annotated[str, msgspec.Meta(min_length=1, max_length=8192)]  # of a ZMQ socket
Leader = Annotated[str, msgspec.Meta(max_length=32)]
Milliseconds = Annotated[int, msgspec.Meta(ge=0, le=MAX_BUSY_MS)]


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """decode -> prefill, first on a connection: identifies the node and says how its memory is written."""

    node: Name
    layout: PoolLayout
    transport: WireDescription
    record_slots: U32
    record_bytes: U32  # per slot
    # Incarnation of the node's tensor-parallel rank 0, from which those of the other ranks follow; "": its own.
    leader: Leader = ""


class Slots(msgspec.Struct, frozen=True, tag="slots"):
    """decode -> prefill: asks for the pages of this room to be written to these destinations."""

    room: U63
    generation: U63
    # Destinations of the logical pages from held_pages on, in order.
    pages: Annotated[tuple[U32, ...], msgspec.Meta(max_length=MAX_PAGES)]
    record_slot: U32
    held_pages: U32  # logical pages that the decode node already has
    deadline_ms: U63 | None = None  # time left of the request when this was sent
    state_slot: U32 = 0  # in the planes that are kept per request; 0 if there are none


class AbortTransfer(msgspec.Struct, frozen=True, tag="abort"):
    """decode -> prefill: asks to stop; answered by AbortAck once no write of this generation is outstanding."""

    room: U63
    generation: U63
    code: Code
    reason: Reason


class Queued(msgspec.Struct, frozen=True, tag="queued"):
    """decode -> prefill, periodically: these rooms wait for pages on the decode node, and Slots will follow.

    Together with Working it bounds every wait by heartbeats: a room that neither side names is lost.
    """

    rooms: Rooms
    busy_ms: Milliseconds  # the loop of the message's sender may be silent for this long


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """prefill -> decode: accepts the handshake; names the process that will write and its tensor-parallel rank."""

    node: Name
    process: ProcessIdentity
    tp_rank: U32 = 0
    tp_size: Ranks = 1
    # Only from rank 0: the peer addresses of all ranks of its node, in order.
    addresses: Annotated[tuple[Address, ...], msgspec.Meta(max_length=MAX_RANKS)] = ()


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """prefill -> decode: refuses the handshake and says why."""

    reason: Reason


class HelloNeeded(msgspec.Struct, frozen=True, tag="hello_needed"):
    """prefill -> decode: slots have come from a node that a router had reported as lost; nothing is written to them.

    A decode node that was stopped may grant pages before it learns that its router had lost it.
    """


class PagesWritten(msgspec.Struct, frozen=True, tag="pages_written"):
    """prefill -> decode: logical pages first .. first+count-1 have landed."""

    room: U63
    generation: U63
    first: U32
    count: U32


class RecordWritten(msgspec.Struct, frozen=True, tag="record_written"):
    """prefill -> decode: all pages and the record have landed; no write of this generation is outstanding."""

    room: U63
    generation: U63
    length: U32
    sent_at: float = 0.0  # Unix seconds, for the timeline of the request


class SenderFailed(msgspec.Struct, frozen=True, tag="sender_failed"):
    """prefill -> decode: nothing more will arrive, and no write of this generation is outstanding."""

    room: U63
    generation: U63
    code: Code
    reason: Reason


class AbortAck(msgspec.Struct, frozen=True, tag="abort_ack"):
    """prefill -> decode: no write of this generation is outstanding, and none will follow."""

    room: U63
    generation: U63


class Working(msgspec.Struct, frozen=True, tag="working"):
    """prefill -> decode, periodically: these rooms have slots and are being processed or are queued."""

    rooms: Rooms
    busy_ms: Milliseconds  # the loop of the message's sender may be silent for this long


ToSender = Hello | Slots | AbortTransfer | Queued
ToReceiver = (
    Welcome | Refused | HelloNeeded | PagesWritten | RecordWritten | SenderFailed | AbortAck | Working
)

_encoder = msgspec.msgpack.Encoder()
_sender_decoder = msgspec.msgpack.Decoder(ToSender)
_receiver_decoder = msgspec.msgpack.Decoder(ToReceiver)


SCHEMA_HASH: Final = schema_hash(
    (
        *(Hello, Slots, AbortTransfer, Queued),
        *(Welcome, Refused, HelloNeeded, PagesWritten, RecordWritten, SenderFailed, AbortAck, Working),
        *(PoolLayout, PoolSpec, Plane, HeadGroup, ProcessIdentity),
    )
)


def encode(message: ToSender | ToReceiver, incarnation: str) -> bytes:
    """Return the frame. `incarnation` is this process's own: 32 hex digits."""
    envelope = _ENVELOPE.pack(MAGIC, KV_PROTOCOL_VERSION, 0, SCHEMA_HASH, bytes.fromhex(incarnation))
    return envelope + _encoder.encode(message)


def decode_for_sender(frame: bytes) -> tuple[str, ToSender]:
    """Return (incarnation of the peer, message). Raises ProtocolError; HandshakeRefused for another version."""
    incarnation, body = _open(frame)
    try:
        return incarnation, _sender_decoder.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ProtocolError(f"not a message for a prefill node: {error}") from None


def decode_for_receiver(frame: bytes) -> tuple[str, ToReceiver]:
    """Return (incarnation of the peer, message). Raises ProtocolError; HandshakeRefused for another version."""
    incarnation, body = _open(frame)
    try:
        return incarnation, _receiver_decoder.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ProtocolError(f"not a message for a decode node: {error}") from None


def _open(frame: bytes) -> tuple[str, memoryview]:
    if len(frame) > MAX_FRAME_BYTES:
        raise ProtocolError(f"frame of {len(frame)} bytes, limit is {MAX_FRAME_BYTES}")
    if len(frame) < _ENVELOPE.size:
        raise ProtocolError(f"frame of {len(frame)} bytes is shorter than the envelope of {_ENVELOPE.size}")
    magic, version, _, schema, incarnation = _ENVELOPE.unpack_from(frame)
    if magic != MAGIC:
        raise ProtocolError("not a KV transfer frame")
    if version != KV_PROTOCOL_VERSION:
        raise HandshakeRefused(
            f"the peer speaks KV protocol {version}, this node speaks {KV_PROTOCOL_VERSION}; "
            "run the same tandem version on both"
        )
    if schema != SCHEMA_HASH:
        raise HandshakeRefused(
            f"the peer's KV message schema is {schema:016x}, this node's is {SCHEMA_HASH:016x}; "
            "run the same tandem version on both"
        )
    return incarnation.hex(), memoryview(frame)[_ENVELOPE.size :]
