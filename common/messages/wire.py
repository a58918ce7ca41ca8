"""Encode and decode one inbox. Decoding never raises anything but ProtocolError and never runs what it reads."""

from __future__ import annotations

from typing import Generic, TypeVar

import msgspec

from common.errors import ProtocolError

T_co = TypeVar("T_co", covariant=True)

MAX_REASON = 300  # characters: msgspec quotes what it refuses, and a peer chooses how long that is

_encoder = msgspec.msgpack.Encoder()


def encode(message: msgspec.Struct) -> bytes:
    return _encoder.encode(message)


class InboxCodec(Generic[T_co]):
    """Decoder for one inbox: a union of tagged structs. Everything else is refused with a sentence."""

    def __init__(self, inbox: object, name: str) -> None:
        self._decoder: msgspec.msgpack.Decoder[T_co] = msgspec.msgpack.Decoder(inbox)
        self.name = name

    def decode(self, frame: bytes | memoryview) -> T_co:
        """Raises ProtocolError for truncated, corrupt, unknown or wrongly typed messages."""
        try:
            return self._decoder.decode(frame)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError) as error:
            reason = str(error)[:MAX_REASON]
            raise ProtocolError(f"{self.name}: refused a message of {len(frame)} bytes: {reason}") from error
