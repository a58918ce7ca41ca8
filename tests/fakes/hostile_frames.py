"""Input that violates protocols: bytes for TCP ports, message parts for ZMQ sockets, payloads for sessions."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator

import msgspec

from common.ipc.session import FrameKind, frame
from common.messages.router_inbox import Goodbye
from common.messages.wire import encode
from kv_transfer import messages
from kv_transfer.transport.tcp import frames as tcp_frames

INCARNATION = "ab" * 16
HUGE = 0xFFFFFFFF
# of ZMTP: signature; then follow version, mechanism, as-server, filler
GREETING = b"\xff" + bytes(8) + b"\x7f"
DEEP = 100_000


def _greeting(mechanism: bytes) -> bytes:
    return GREETING + b"\x03\x01" + mechanism.ljust(20, b"\0") + bytes(32)


def _command(name: bytes, body: bytes, size: int | None = None) -> bytes:
    """Return a long ZMTP command; `size` is what its header claims."""
    payload = bytes([len(name)]) + name + body
    return b"\x06" + struct.pack(">Q", len(payload) if size is None else size) + payload


def byte_streams(rng: random.Random) -> Iterator[bytes]:
    """Yield bytes to send on a new connection to any TCP port of a cluster."""
    for size in (0, 1, 9, 63, 64, 65, 84, 300, 70_000, 1 << 20):
        yield rng.randbytes(size)
    yield b"GET / HTTP/1.1\r\nHost: cluster\r\n\r\n"
    yield b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + rng.randbytes(512)
    for mechanism in (b"NULL", b"PLAIN", b"CURVE", b"GSSAPI", b"\xff" * 20, b""):
        yield _greeting(mechanism)
        yield _greeting(mechanism) + rng.randbytes(5_000)
    yield GREETING[:5]
    yield _greeting(b"CURVE")[:40]
    claimed: int | None
    for claimed in (None, 0, 1, 1 << 31, (1 << 63) - 1, (1 << 64) - 1):
        yield _greeting(b"CURVE") + _command(b"HELLO", b"\x01\x00" + rng.randbytes(192), claimed)
        yield _greeting(b"CURVE") + _command(b"INITIATE", rng.randbytes(300), claimed)
        yield _greeting(b"NULL") + _command(b"READY", b"\x0bSocket-Type\0\0\0\x06DEALER", claimed)
    key = rng.randbytes(tcp_frames.KEY_BYTES)
    proof = tcp_frames.proof(key, rng.randbytes(tcp_frames.NONCE_BYTES))
    yield proof
    yield proof[:20]
    yield proof * 1_000
    yield tcp_frames.PROOF_MAGIC + bytes(tcp_frames.PROOF.size - 4)
    for magic in (tcp_frames.FRAME_MAGIC, tcp_frames.CHALLENGE_MAGIC, tcp_frames.ACK_MAGIC):
        yield magic + rng.randbytes(100_000)


def zmq_messages(rng: random.Random) -> Iterator[list[bytes]]:
    """Yield ZMQ messages that are not frames of a session."""
    yield [b""]
    yield [b"", b""]
    yield [b"x"] * 3
    yield [b""] * 5_000
    for size in (1, 39, 40, 41, 300, 70_000):
        yield [rng.randbytes(size)]
        yield [rng.randbytes(size), rng.randbytes(size)]
        yield [b"", rng.randbytes(size), b""]
    yield [rng.randbytes(40), rng.randbytes(4 << 20)]
    for kind in FrameKind:
        header, payload = frame(
            kind, rng.getrandbits(63), rng.getrandbits(63), rng.getrandbits(63), b"payload"
        )
        yield [header, payload + b"!"]
        yield [header[:-1], payload]
        yield [bytes([kind ^ 0x40]) + header[1:], payload]


def session_frames(rng: random.Random) -> Iterator[list[bytes]]:
    """Yield frames with a correct digest whose session does not exist or whose sequence number jumps."""
    for kind in FrameKind:
        for number in (0, 1, 1 << 40, (1 << 64) - 1):
            for acknowledged in (0, (1 << 64) - 1):
                yield list(frame(kind, rng.getrandbits(64), number, acknowledged, rng.randbytes(20)))


def packed(rng: random.Random) -> Iterator[bytes]:
    """Yield invalid msgpack, and msgpack with false sizes and depths."""
    size = struct.pack(">I", HUGE)
    yield b""
    yield rng.randbytes(500)
    yield b"\x91" * DEEP + b"\xc0"
    yield b"\x81\xa1x" * DEEP + b"\xc0"
    for head in (b"\xdd", b"\xdf", b"\xdb", b"\xc6", b"\xc9"):
        yield head + size
        yield b"\x81\xa4type" + head + size
    for kind in (
        b"Register",
        b"Heartbeat",
        b"Tokens",
        b"FirstToken",
        b"Failed",
        b"hello",
        b"slots",
        b"abort",
    ):
        tag = b"\xa4type" + bytes([0xA0 + len(kind)]) + kind
        yield b"\x81" + tag
        yield b"\x82" + tag + b"\xa4runs\xdd" + size
        yield b"\x83" + tag + b"\xa4room\xcb\x7f\xf8" + bytes(6) + b"\xa5token\x91" + b"\x91" * 1_000
        yield b"\x82" + tag + b"\xa5pages\xdc\xff\xff" + b"\xce\xff\xff\xff\xff" * 0xFFFF
        yield b"\x82" + tag + b"\xa4node" + b"\x91" * DEEP
    yield encode(Goodbye(incarnation=INCARNATION)) + b"more"


def peer_messages(rng: random.Random) -> Iterator[bytes]:
    """Yield messages that no decode node may send: bad envelopes, and valid ones with bad bodies."""
    good = messages.encode(messages.AbortTransfer(room=1, generation=2, code="x", reason="r"), INCARNATION)
    envelope = good[: messages._ENVELOPE.size]
    for cut in range(0, len(envelope), 7):
        yield envelope[:cut]
    yield envelope[:4] + rng.randbytes(len(envelope) - 4)
    for body in packed(rng):
        yield envelope + body
    for number in (0, 1, (1 << 63) - 1):
        pages = tuple(range(1_000))
        slots = messages.Slots(number, number, pages, messages.MAX_PAGES, messages.MAX_PAGES)
        for message in (
            slots,
            messages.AbortTransfer(number, number, "c", "r"),
            messages.Queued((number,), 3_600_000),
        ):
            yield messages.encode(message, INCARNATION)
            yield messages.encode(message, INCARNATION)[:-1]
    wrong = msgspec.msgpack.encode(
        {"type": "hello", "node": "decode-1", "layout": {"fingerprint": "x" * 9_000}}
    )
    yield envelope + wrong
