"""The contiguous record that ends a transfer: what the decode node needs in addition to the pages.

    magic 8s | version u32 | payload length u32 | room u64 | generation u64 | xxh3 u64 | payload | trailer u64

Little-endian. The hash covers the header fields before it and the payload. The trailer repeats the generation and
lands last, so a record is complete only if header and trailer agree. It is never written before the pages.
"""

from __future__ import annotations

import struct
from typing import Annotated, Final, Literal

import msgspec
import xxhash

from common.errors import RecordError

MAGIC: Final = b"TNDMREC\0"
# Raise it with every change of the header or of HandoffRecord, which the schema hash of messages does not cover.
VERSION: Final = 3
SLOT_ALIGN: Final = 64  # bytes

_HEADER: Final = struct.Struct("<8sIIQQ")  # magic, version, payload length, room, generation
_HASH: Final = struct.Struct("<Q")
_TRAILER: Final = struct.Struct("<Q")
OVERHEAD: Final = _HEADER.size + _HASH.size + _TRAILER.size

HiddenDtype = Literal["", "float32", "bfloat16", "float16"]
Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class HandoffRecord(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Contents of a record. The draft fields are empty without speculation."""

    first_token: Count
    num_tokens: Count  # prompt tokens whose KV the decode node now has
    cached_tokens: Count = 0  # among num_tokens: found in the prefill node's prefix cache
    # u64 little-endian, one per page sent and one for the state if there is any; filled in by Sender
    checksums: bytes = b""
    draft_topk_probs: tuple[float, ...] = ()  # [topk or topk * steps]
    draft_topk_ids: tuple[int, ...] = ()  # same length
    draft_hidden: bytes = b""  # [hidden width] of draft_hidden_dtype
    draft_hidden_dtype: HiddenDtype = ""

    def __post_init__(self) -> None:
        if len(self.draft_topk_probs) != len(self.draft_topk_ids):
            raise ValueError(
                f"{len(self.draft_topk_probs)} draft probabilities, {len(self.draft_topk_ids)} tokens"
            )
        if len(self.checksums) % 8:
            raise ValueError(f"{len(self.checksums)} bytes of checksums: not a multiple of 8")
        if bool(self.draft_hidden) != bool(self.draft_hidden_dtype):
            raise ValueError("draft_hidden and draft_hidden_dtype come together")


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(HandoffRecord)


def pack_checksums(checksums: list[int]) -> bytes:
    return struct.pack(f"<{len(checksums)}Q", *checksums)


def unpack_checksums(packed: bytes) -> list[int]:
    return list(struct.unpack(f"<{len(packed) // 8}Q", packed))


def record_bytes(max_pages: int, draft_topk: int = 0, hidden_bytes: int = 0) -> int:
    """Return the bytes of a slot that fits every record within these limits: a multiple of SLOT_ALIGN."""
    scalar = 9  # the largest msgpack integer or float
    payload = 96 + 6 * scalar + 8 * (max_pages + 1) + 2 * scalar * draft_topk + hidden_bytes
    return -(-(OVERHEAD + payload) // SLOT_ALIGN) * SLOT_ALIGN


def encode(record: HandoffRecord, room: int, generation: int, slot_bytes: int) -> bytes:
    """Return the bytes of the record. Raises RecordError("length") when it does not fit in the slot."""
    payload = _encoder.encode(record)
    if OVERHEAD + len(payload) > slot_bytes:
        raise RecordError(
            "length",
            f"handoff record of room {room} has {OVERHEAD + len(payload)} bytes, its slot {slot_bytes}; "
            "raise record_bytes of the transfer limits (handoff_record.record_bytes computes the size)",
        )
    header = _HEADER.pack(MAGIC, VERSION, len(payload), room, generation)
    return b"".join((header, _HASH.pack(_digest(header, payload)), payload, _TRAILER.pack(generation)))


def decode(buffer: bytes, room: int, generation: int) -> HandoffRecord:
    """Return the record.

    Raises RecordError; `cause` is magic, version, room, generation, length, crc, trailer or payload.
    """
    if len(buffer) < OVERHEAD:
        raise RecordError("length", f"record of room {room}: {len(buffer)} bytes are fewer than a header has")
    magic, version, length, got_room, got_generation = _HEADER.unpack_from(buffer)
    for cause, expected, got in (
        ("magic", MAGIC, magic),
        ("version", VERSION, version),
        ("room", room, got_room),
        ("generation", generation, got_generation),
    ):
        if expected != got:
            raise RecordError(cause, f"record of room {room}: {cause} is {got!r}, expected {expected!r}")
    start = _HEADER.size + _HASH.size
    end = start + length
    if end + _TRAILER.size > len(buffer):
        raise RecordError(
            "length", f"record of room {room} claims {length} payload bytes: more than its slot"
        )
    payload = buffer[start:end]
    if _HASH.unpack_from(buffer, _HEADER.size)[0] != _digest(buffer[: _HEADER.size], payload):
        raise RecordError("crc", f"record of room {room} does not match its hash")
    if _TRAILER.unpack_from(buffer, end)[0] != generation:
        raise RecordError(
            "trailer", f"record of room {room}: the trailer does not have generation {generation}"
        )
    try:
        return _decoder.decode(payload)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise RecordError("payload", f"record of room {room}: {error}") from None


def _digest(header: bytes, payload: bytes) -> int:
    digest = xxhash.xxh3_64(header)
    digest.update(payload)
    return int(digest.intdigest())
