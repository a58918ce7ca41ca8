"""The frames between rank 0 and the other ranks of a node: in order, each exactly once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import msgspec

from common.messages.wire import encode

SEND_SECONDS = 5.0  # seconds until a channel without room is an error


class AnnounceWork(msgspec.Struct, frozen=True, tag=True):
    """rank 0 -> ranks: tell the peers now that this node's loops may be silent for this long."""

    seconds: float


class FrameWriter(Protocol):
    """The end of a channel that sends to one reader or to several."""

    def send(self, frame: bytes, timeout: float, /) -> None:
        """Send a frame to all readers. Raises a TandemError after `timeout` seconds without room."""
        ...


class FrameReader(Protocol):
    """The end of a channel that receives."""

    def take(self) -> bytes | None:
        """Return the next frame, or None if there is none now."""
        ...

    def fileno(self) -> int:
        """Return the descriptor that is readable once frames have arrived, until `clear`."""
        ...

    def clear(self) -> None:
        """Reset the descriptor. Called before `take`."""
        ...


def frames(reader: FrameReader) -> Iterator[bytes]:
    """Yield all frames that have arrived."""
    reader.clear()
    while (frame := reader.take()) is not None:
        yield frame


def send_message(writer: FrameWriter, message: msgspec.Struct) -> None:
    """Send a message as one frame. Raises as `FrameWriter.send` does."""
    writer.send(encode(message), SEND_SECONDS)
