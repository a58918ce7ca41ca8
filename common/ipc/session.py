"""Reliable delivery over a ZMQ connection: every frame arrives once and in order, or the session is reset.

ZMQ by itself loses frames in flight when a connection breaks, and delivers bytes that the network has corrupted. A
session numbers its frames, keeps each until the peer has acknowledged it, and sends them again if the peer reports a
gap.

A frame is a header and a payload. The header contains its kind, the session's epoch and opening, a number, the highest
number received in a row from the peer, and a digest of header and payload; a frame whose digest differs counts as lost.

The connecting side chooses the epoch, the listening side the opening. A listening side that forgets its peer between
two OPENs of one epoch opens that epoch twice. The second opening tells both sides that the numbers begin again.

    OPEN   first frame of an epoch, by the connecting side, until the peer answers; number: none
    DATA   number: of this frame, from 1; its payload is one message
    PACK   the same, with several messages in its payload
    PROBE  "I have sent up to `number`": sent after a silence; the answer says what was lost
    ACK    number: 0, or the number of the frame that it answers; unacknowledged frames up to that number were
           lost, since one connection keeps its order
    RESET  the listening side does not know this epoch or opening: it is another process, or it has forgotten the peer

Data is never sent again because of elapsed time; only small probes are. A peer whose loop is busy for seconds costs a
few probes, not its prompts twice.

Frames that the connecting side sends before it has an answer may be delivered twice: to a process that ends and to its
successor, or to one process that forgets its peer in between. They must be harmless there: a registration, a greeting,
and messages that name an incarnation.
"""

from __future__ import annotations

import enum
import struct
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Annotated

import msgspec
import xxhash

from common.errors import ProtocolError

HEADER = struct.Struct("<B3xIQQQQ")  # kind, opening, epoch, number, acknowledged, digest
_DIGESTED = struct.Struct("<B3xIQQQ")  # the header without its digest
_DIGESTED_SIZE = _DIGESTED.size
MAX_OPENING = (1 << 32) - 1
_NO_DIGEST = bytes(8)
# Returns the digest of a payload; its second argument is that of the header, with zeros in place of the digest.
_digest = xxhash.xxh3_64_intdigest
PROBE_SECONDS = 0.25  # silence while something is unacknowledged; doubled up to MAX_PROBE_SECONDS
MAX_PROBE_SECONDS = 1.0
ACK_SECONDS = 0.1  # for which an acknowledgement waits for a frame that carries it
ACK_FRAMES = 64  # received frames after which it is sent at once
ACK_BYTES = 1 << 20
GAP_SECONDS = 0.2  # between two reports of one gap
# Messages that share a frame, and their bytes: the frame stays SMALL.
MAX_PACKED, MAX_PACKED_BYTES = 64, 8 << 10
SMALL = 16 << 10  # payloads below are bounded only by their number, so an abort can pass waiting images

Frame = tuple[bytes, bytes]  # header, payload


class FrameKind(enum.IntEnum):
    """The kind of a frame."""

    OPEN = 1
    DATA = 2
    PROBE = 3
    ACK = 4
    RESET = 5
    PACK = 6


_KINDS = {int(kind): kind for kind in FrameKind}
# As integers: to convert a member of an enum costs more than to write the header.
DATA, PACK = int(FrameKind.DATA), int(FrameKind.PACK)
_pack = msgspec.msgpack.Encoder().encode


class Header(msgspec.Struct, frozen=True):
    """The header of a frame with a correct digest."""

    kind: FrameKind
    opening: int  # 0 from a connecting side that has not heard it yet, and in a RESET
    epoch: int
    number: int
    acknowledged: int


def frame(
    kind: FrameKind, epoch: int, number: int, acknowledged: int, payload: bytes = b"", opening: int = 0
) -> Frame:
    return _framed(int(kind), opening, epoch, number, acknowledged, payload)


def _framed(kind: int, opening: int, epoch: int, number: int, acknowledged: int, payload: bytes) -> Frame:
    head = _DIGESTED.pack(kind, opening, epoch, number, acknowledged)
    digest: int = _digest(payload, _digest(head + _NO_DIGEST))
    return head + digest.to_bytes(8, "little"), payload


def read_header(header: bytes, payload: bytes) -> Header:
    """Parse a header. Raises ProtocolError for a frame that is damaged or does not belong to a session."""
    try:
        kind, opening, epoch, number, acknowledged, digest = HEADER.unpack(header)
        known = _KINDS[kind]
    except (struct.error, KeyError):
        raise ProtocolError("not a frame of a session") from None
    if digest != _digest(payload, _digest(header[:_DIGESTED_SIZE] + _NO_DIGEST)):
        raise ProtocolError("a damaged frame")
    return Header(known, opening, epoch, number, acknowledged)


# The bound keeps a frame from delivering more messages than a turn of a loop should take.
_unpack = msgspec.msgpack.Decoder(Annotated[list[bytes], msgspec.Meta(max_length=MAX_PACKED)]).decode


def pack(messages: Sequence[bytes]) -> bytes:
    """Return the payload of a PACK."""
    return _pack(messages)


def packs(messages: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    """Divide messages, in order, into groups for one frame each: small ones together, as long as the frame is small."""
    start = size = 0
    for at, message in enumerate(messages):
        if at > start and (size + len(message) > MAX_PACKED_BYTES or at - start >= MAX_PACKED):
            yield messages[start:at]
            start, size = at, 0
        size += len(message)
    if messages:
        yield messages[start:]


def unpack(payload: bytes) -> list[bytes]:
    """Return the messages of a PACK. Raises ProtocolError."""
    try:
        messages: list[bytes] = _unpack(payload)
        return messages
    except msgspec.DecodeError as error:
        raise ProtocolError(f"not a pack of messages: {error}") from None


class _Kept(msgspec.Struct, frozen=True):
    """A payload that the peer has not acknowledged."""

    number: int
    payload: bytes
    kind: int


class Session:
    """One end of a session, without a socket: it returns frames to send and is given those that arrive.

    Single-threaded.
    """

    def __init__(self, epoch: int, opening: int, max_frames: int, max_bytes: int, now: float) -> None:
        """Create one end. `opening` is that of the listening side (1 to MAX_OPENING), or 0 for the connecting side.

        The connecting side repeats OPEN until the peer has answered, and takes over the opening from its first frame.
        At most `max_frames` frames, and `max_bytes` of frames that are not SMALL, wait for their acknowledgement.
        """
        self.epoch = epoch
        self.heard_at = now
        self.established = opening != 0
        self.duplicates = 0
        self.gaps = 0
        self.sent_again = 0
        self._opening = opening
        self._max_frames = max_frames
        self._max_bytes = max_bytes
        self._kept: deque[_Kept] = deque()
        self._kept_bytes = 0  # in payloads that are not SMALL
        self._sent = 0  # highest number sent
        self._received = 0  # highest number received in a row
        self._owed = 0  # frames received since the last acknowledgement
        self._owed_bytes = 0
        self._owed_since = 0.0
        self._answer: int | None = None  # highest number that an ACK is owed for
        self._reported: tuple[int, float] = (0, -1e9)  # the number before a gap, and when it was reported
        self._resend = False
        self._probe_after = PROBE_SECONDS
        self._probe_at = float("inf") if opening else now

    @property
    def idle(self) -> bool:
        """True if no frame has to be sent because time passes."""
        waits = self._kept or self._owed or self._resend or self._answer is not None
        return self.established and not waits

    @property
    def owes_answer(self) -> bool:
        """True if the peer waits for frames that `due` returns now."""
        return (
            self._answer is not None
            or self._resend
            or self._owed >= ACK_FRAMES
            or self._owed_bytes >= ACK_BYTES
        )

    def keep(self, payload: bytes, now: float, kind: int = DATA) -> Frame | None:
        """Return the next DATA or PACK frame, kept until it is acknowledged; None while too much is waiting."""
        large = len(payload) if len(payload) >= SMALL else 0
        if len(self._kept) >= self._max_frames:
            return None
        if large and self._kept_bytes and self._kept_bytes + large > self._max_bytes:
            return None
        if not self._kept:
            self._probe_after, self._probe_at = PROBE_SECONDS, now + PROBE_SECONDS
        self._sent += 1
        kept = _Kept(self._sent, payload, kind)
        self._kept.append(kept)
        self._kept_bytes += large
        return self._data(kept)

    def take_back(self) -> None:
        """Undo the latest `keep`, whose frame was not sent and will not be."""
        kept = self._kept.pop()
        assert kept.number == self._sent
        self._sent -= 1
        self._release(kept)

    def continues(self, header: Header) -> bool:
        """True if a frame of the peer belongs to this session; else it needs another one."""
        return header.epoch == self.epoch and (
            header.opening == self._opening or not (header.opening and self._opening)
        )

    def receive(self, header: Header, payload: bytes, now: float) -> bytes | None:
        """Process a frame that continues this session; return its payload if it is the next one.

        The payload of a PACK is still packed.
        """
        self.heard_at = now
        if not self.established:
            self.established, self._opening = True, header.opening
        if self._kept and self._kept[0].number <= header.acknowledged:
            self._acknowledge(header.acknowledged, now)
        if header.kind == DATA or header.kind == PACK:
            if header.number != self._received + 1:
                self._out_of_order(header.number, now)
                return None
            self._received += 1
            if not self._owed:
                self._owed_since = now
            self._owed += 1
            self._owed_bytes += len(payload)
            return payload
        if header.kind in (FrameKind.PROBE, FrameKind.OPEN):
            self._owe_answer(header.number)
        elif header.kind is FrameKind.ACK and header.number and self._kept:
            self._resend = self._resend or self._kept[0].number <= header.number
        return None

    def due(self, now: float) -> list[Frame]:
        """Return the frames to be sent now."""
        frames: list[Frame] = []
        if not self.established:
            if now >= self._probe_at:
                self._wait_for_answer(now)
                frames.append(self._frame(FrameKind.OPEN, 0))
            return frames
        if self._resend:
            self._resend = False
            self.sent_again += len(self._kept)
            frames += [self._data(kept) for kept in self._kept]
            self._wait_for_answer(now)
        if self._answer is not None:
            frames.append(self._ack(self._answer))
            self._answer = None
        elif self._owed and (
            self._owed >= ACK_FRAMES or self._owed_bytes >= ACK_BYTES or now - self._owed_since >= ACK_SECONDS
        ):
            frames.append(self._ack(0))
        if self._kept and now >= self._probe_at:
            frames.append(self.probe(now))
        return frames

    def probe(self, now: float) -> Frame:
        """Return a probe to be sent at once: after a reconnection, frames in flight may be lost."""
        if not self.established:
            return self._frame(FrameKind.OPEN, 0)
        self._wait_for_answer(now)
        return self._frame(FrameKind.PROBE, self._sent)

    def _wait_for_answer(self, now: float) -> None:
        self._probe_at = now + self._probe_after
        self._probe_after = min(2 * self._probe_after, MAX_PROBE_SECONDS)

    def _out_of_order(self, number: int, now: float) -> None:
        """Drop a frame that arrived before, or that follows a lost one."""
        if number <= self._received:
            self.duplicates += 1
            self._owed = max(self._owed, 1)
            return
        after, at = self._reported
        if after != self._received or now - at >= GAP_SECONDS:
            self.gaps += 1
            self._reported = (self._received, now)
            self._owe_answer(number)

    def _owe_answer(self, number: int) -> None:
        """Owe one ACK for all that was asked up to `number`; several would repeat lost frames several times."""
        self._answer = max(number, self._answer or 0)

    def _acknowledge(self, number: int, now: float) -> None:
        """Drop the frames up to `number`."""
        kept = self._kept
        while kept and kept[0].number <= number:
            self._release(kept.popleft())
        self._probe_after, self._probe_at = PROBE_SECONDS, now + PROBE_SECONDS

    def _release(self, kept: _Kept) -> None:
        if len(kept.payload) >= SMALL:
            self._kept_bytes -= len(kept.payload)

    def _data(self, kept: _Kept) -> Frame:
        self._owed = self._owed_bytes = 0
        return _framed(kept.kind, self._opening, self.epoch, kept.number, self._received, kept.payload)

    def _ack(self, number: int) -> Frame:
        self._owed = self._owed_bytes = 0
        return self._frame(FrameKind.ACK, number)

    def _frame(self, kind: FrameKind, number: int) -> Frame:
        return frame(kind, self.epoch, number, self._received, opening=self._opening)
