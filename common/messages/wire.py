"""Encodes and decodes the messages of an inbox. Decoding raises only ProtocolError and never executes its input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import msgspec

from common.errors import ProtocolError

T_co = TypeVar("T_co", covariant=True)

MAX_REASON = 300  # characters; msgspec quotes refused input, whose length the peer chooses

encode: Callable[[msgspec.Struct], bytes] = msgspec.msgpack.Encoder().encode


class InboxCodec(Generic[T_co]):
    """Decoder of one inbox, a union of tagged structs. Everything else is refused with a sentence."""

    def __init__(self, inbox: object, name: str) -> None:
        self._decoder: msgspec.msgpack.Decoder[T_co] = msgspec.msgpack.Decoder(inbox)
        self.name = name

    def decode(self, frame: bytes | memoryview) -> T_co:
        """Return the message. Raises ProtocolError if it is truncated, corrupt, unknown or wrongly typed."""
        try:
            return self._decoder.decode(frame)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError) as error:
            reason = str(error)[:MAX_REASON]
            raise ProtocolError(f"{self.name}: refused a message of {len(frame)} bytes: {reason}") from error
