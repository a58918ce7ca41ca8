"""Splits a stream of server-sent events into the data of its events."""

from __future__ import annotations

MAX_EVENT_BYTES = 16 << 20


class EventTooLong(Exception):
    """An event exceeds MAX_EVENT_BYTES."""


class EventSplitter:
    """Collects bytes as they arrive and returns the data of the events that are complete.

    Only lines that begin with `data:` count; a line ends with LF or CRLF. Other fields of the format have no use here.
    """

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, received: bytes) -> list[bytes]:
        """Return the data of each line that `received` completes, in order. Raises EventTooLong."""
        *lines, self._rest = (self._rest + received).split(b"\n")
        if len(self._rest) > MAX_EVENT_BYTES:
            raise EventTooLong(f"an event of the stream has more than {MAX_EVENT_BYTES >> 20} MiB")
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]
