"""Records what happens to every request in this process: one JSON line per step, for the history checker
(tests/chaos).

Lines are collected and written once per turn of the loop with one write(2), so a process that is killed loses at most
the events of one turn. A file that cannot be written never stops serving: events are dropped and counted.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from common.messages.generation import OutputToken
from common.observability.logs import Log

COMPLAINT_INTERVAL: Final = 60.0  # seconds between two log lines about dropped events

_encode = msgspec.json.Encoder(enc_hook=str).encode


class EventLog:
    """The log that records nothing, and the interface of the one that does. Used by one thread."""

    records = False  # whether `add` does anything: callers may spare the work for its arguments

    def add(self, event: str, room: int = 0, **fields: object) -> None:
        """Record a step of a request. `room` identifies an attempt; 0 if there is none yet."""

    def add_tokens(
        self, event: str, offset: int, tokens: Sequence[OutputToken], room: int = 0, **fields: object
    ) -> None:
        """Record a run of tokens; `offset` counts from the first token that the event is about."""

    def flush(self) -> None:
        """Write the recorded events. Called once per turn of the loop."""

    def close(self) -> None:
        """Write what remains and close the file."""


NO_EVENTS: Final = EventLog()


class FileEventLog(EventLog):
    """Appends to DIRECTORY/NAME-INCARNATION.jsonl. The first line identifies the process."""

    records = True

    def __init__(
        self,
        directory: Path,
        name: str,
        incarnation: str,
        log: Log,
        soon: Callable[[Callable[[], None]], object] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`soon` schedules a flush at the end of the current turn; None: the loop calls `flush` itself."""
        self.dropped = 0  # lines that could not be written
        self._file = directory / f"{name}-{incarnation}.jsonl"
        self._log = log
        self._soon = soon
        self._clock = clock
        self._lines: list[bytes] = []
        self._torn = False  # the last write ended within a line
        self._complained_at = float("-inf")
        self._descriptor: int | None = None
        self.add("start", node=name, incarnation=incarnation, pid=os.getpid())
        self.flush()

    def add(self, event: str, room: int = 0, **fields: object) -> None:
        if not self._lines and self._soon is not None:
            self._soon(self.flush)
        self._lines.append(_encode({"t": self._clock(), "event": event, "room": room, **fields}))

    def add_tokens(
        self, event: str, offset: int, tokens: Sequence[OutputToken], room: int = 0, **fields: object
    ) -> None:
        self.add(event, room, offset=offset, ids=[token.id for token in tokens], **fields)

    def flush(self) -> None:
        if not self._lines:
            return
        lines, self._lines = self._lines, []
        data = b"".join([b"\n" if self._torn else b"", *(line + b"\n" for line in lines)])
        try:
            if self._descriptor is None:
                self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
                self._descriptor = os.open(self._file, flags, 0o600)
            written = os.write(self._descriptor, data)
        except OSError as error:
            self._drop(len(lines), error.strerror or str(error))
            return
        self._torn = written < len(data) and not data[:written].endswith(b"\n")
        if written < len(data):
            self._drop(data[written:].count(b"\n"), "the disk is full")

    def close(self) -> None:
        self.flush()
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _drop(self, lines: int, reason: str) -> None:
        self.dropped += lines
        now = self._clock()
        if now - self._complained_at >= COMPLAINT_INTERVAL:
            self._complained_at = now
            self._log.warning(
                "events were dropped", file=str(self._file), reason=reason, dropped=self.dropped
            )


def event_log(
    directory: Path | None,
    name: str,
    incarnation: str,
    log: Log,
    soon: Callable[[Callable[[], None]], object] | None = None,
) -> EventLog:
    """Return the log of this process in `directory`; None: record nothing."""
    return NO_EVENTS if directory is None else FileEventLog(directory, name, incarnation, log, soon)
