"""The bytes of the TCP transport.

    receiver -> sender   challenge: magic, nonce
    sender -> receiver   proof: magic, id of the key, HMAC-SHA256(key, nonce)
    sender -> receiver   header {magic, region, generation, offset, length, rows, stride, xxh3 of these}, payload
    receiver -> sender   one ack per frame, in order: magic, status, bytes of the payload

The payload is `rows` rows of `length` bytes without gaps, which lie `stride` bytes apart at their destination.

The key came over the control channel in Hello and never crosses this connection. Payload integrity is the
business of the page checksums and of the record's hash; secrecy is the business of the network.
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
REVOKED: Final = 1  # the window was shut meanwhile: the payload was thrown away

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
    """`rows` rows of `length` bytes, for byte `offset` of a region and every `stride` bytes from there."""

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
        """The byte after the last one that the frame writes."""
        return self.offset + (self.rows - 1) * self.stride + self.length


def pack(frame: Frame) -> bytes:
    region = _REGIONS.index(frame.region)
    head = _HEAD.pack(FRAME_MAGIC, region, *frame[1:])
    return head + _HASH.pack(xxhash.xxh3_64_intdigest(head))


def unpack(header: bytes, max_frame_bytes: int) -> Frame:
    """Raises Violation for anything that `pack` does not make."""
    magic, region, generation, offset, length, rows, stride = _HEAD.unpack_from(header)
    if magic != FRAME_MAGIC or _HASH.unpack_from(header, _HEAD.size)[0] != xxhash.xxh3_64_intdigest(
        header[: _HEAD.size]
    ):
        raise Violation("header", "no frame header")
    apart = stride == 0 if rows == 1 else stride >= length
    if region >= len(_REGIONS) or not apart or not 0 < length * rows <= max_frame_bytes:
        raise Violation(
            "header", f"a frame of {rows} rows of {length} bytes, {stride} apart, for region {region}"
        )
    return Frame(_REGIONS[region], generation, offset, length, rows, stride)


def key_id(key: bytes) -> bytes:
    """16 bytes that name the key and do not tell it."""
    return hashlib.sha256(b"tandem kv key id" + key).digest()[:16]


def proof(key: bytes, nonce: bytes) -> bytes:
    """What the sender sends to show that it was told the key."""
    return PROOF.pack(PROOF_MAGIC, key_id(key), hmac.digest(key, nonce, hashlib.sha256))


def proves(answer: bytes, key: bytes, nonce: bytes) -> bool:
    """Constant-time."""
    return hmac.compare_digest(answer, proof(key, nonce))


def split(copies: Iterable[Copy], max_frame_bytes: int) -> Iterator[Copy]:
    """The same bytes in pieces of one frame each."""
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
