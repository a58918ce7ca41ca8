"""The wire format of the TCP transport.

    receiver -> sender   challenge: magic, nonce
    sender -> receiver   proof: magic, id of the key, HMAC-SHA256(key, nonce)
    sender -> receiver   header {magic, region, generation, offset, length, rows, stride, xxh3 of these}, payload
    receiver -> sender   one ack per frame, in order: magic, status, bytes of the payload

The payload is `rows` rows of `length` bytes without gaps, which are `stride` bytes apart at their destination.

The key is sent in Hello over the control channel and never crosses this connection. Page checksums and the record's
hash protect the integrity of the payload; confidentiality is left to the network.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

import xxhash

from common.errors import ProtocolError
from kv_transfer.copy_plan import Copy, single_rows
from kv_transfer.transport.base import Region

KEY_BYTES: Final = 32
NONCE_BYTES: Final = 32
CHALLENGE: Final = struct.Struct("<4s32s")
PROOF: Final = struct.Struct("<4s16s32s")
ACK: Final = struct.Struct("<4sII")  # magic, status, payload length
HEADER_BYTES: Final = 48

LANDED: Final = 0
REVOKED: Final = 1  # the window was closed meanwhile: the payload was discarded

CHALLENGE_MAGIC: Final = b"TKC1"
PROOF_MAGIC: Final = b"TKP1"
FRAME_MAGIC: Final = b"TKF2"
ACK_MAGIC: Final = b"TKA1"

_HEAD: Final = struct.Struct("<4sIQQIIQ")  # magic, region, generation, offset, length, rows, stride
_HASH: Final = struct.Struct("<Q")
_REGIONS: Final = (Region.KV, Region.RECORDS)


class Violation(ProtocolError):
    """The peer broke the protocol and is dropped; `cause` is a short metric label."""

    def __init__(self, cause: str, message: str) -> None:
        super().__init__(message)
        self.cause = cause


class Frame(NamedTuple):
    """`rows` rows of `length` bytes, at byte `offset` of a region and every `stride` bytes from it."""

    region: Region
    generation: int
    offset: int
    length: int
    rows: int = 1
    stride: int = 0  # 0 for a single row

    @property
    def nbytes(self) -> int:
        """Bytes of the payload."""
        return self.length * self.rows

    @property
    def end(self) -> int:
        """Offset after the last byte that the frame writes."""
        return self.offset + (self.rows - 1) * self.stride + self.length


def pack(frame: Frame) -> bytes:
    region = _REGIONS.index(frame.region)
    head = _HEAD.pack(FRAME_MAGIC, region, *frame[1:])
    return head + _HASH.pack(xxhash.xxh3_64_intdigest(head))


def unpack(header: bytes, max_frame_bytes: int) -> Frame:
    """Parse a header. Raises Violation for anything that `pack` does not produce."""
    magic, region, generation, offset, length, rows, stride = _HEAD.unpack_from(header)
    if magic != FRAME_MAGIC or _HASH.unpack_from(header, _HEAD.size)[0] != xxhash.xxh3_64_intdigest(
        header[: _HEAD.size]
    ):
        raise Violation("header", "not a frame header")
    apart = stride == 0 if rows == 1 else stride >= length
    if region >= len(_REGIONS) or not apart or not 0 < length * rows <= max_frame_bytes:
        raise Violation(
            "header", f"a frame of {rows} rows of {length} bytes, {stride} apart, for region {region}"
        )
    return Frame(_REGIONS[region], generation, offset, length, rows, stride)


def key_id(key: bytes) -> bytes:
    """Return 16 bytes that identify the key without revealing it."""
    return hashlib.sha256(b"tandem kv key id" + key).digest()[:16]


def proof(key: bytes, nonce: bytes) -> bytes:
    """Return the message by which the sender proves that it knows the key."""
    return PROOF.pack(PROOF_MAGIC, key_id(key), hmac.digest(key, nonce, hashlib.sha256))


def proves(answer: bytes, key: bytes, nonce: bytes) -> bool:
    """Return whether `answer` is the proof for this key and nonce, in constant time."""
    return hmac.compare_digest(answer, proof(key, nonce))


def split(copies: Iterable[Copy], max_frame_bytes: int) -> Iterator[Copy]:
    """Yield the same bytes in pieces of one frame each."""
    for copy in copies:
        rows = max_frame_bytes // copy.length
        if copy.rows == 1 or not rows:
            for row in single_rows([copy]):
                yield from _split_row(row, max_frame_bytes)
            continue
        for first in range(0, copy.rows, rows):
            src, dst = copy.src + first * copy.src_stride, copy.dst + first * copy.dst_stride
            count = min(rows, copy.rows - first)
            strides = (copy.src_stride, copy.dst_stride) if count > 1 else (0, 0)
            yield Copy(src, dst, copy.length, count, *strides)


def _split_row(row: Copy, max_frame_bytes: int) -> Iterator[Copy]:
    for start in range(0, row.length, max_frame_bytes):
        length = min(max_frame_bytes, row.length - start)
        yield Copy(row.src + start, row.dst + start, length)
