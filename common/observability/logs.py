"""One JSON object per line on stderr: time, level, node, event, and the fields of the call (room, request_id, ...).

A log that cannot be written (a full disk, a closed pipe, a reader that has stopped) never stops a process: lost lines
are counted, and their number is logged once writing works again.
"""

from __future__ import annotations

import json
import logging
import os
import time
from functools import lru_cache
from typing import Any

import msgspec

from common.observability.stderr_file import STDERR, RoomPatience, StderrFile

_encode = msgspec.json.Encoder(enc_hook=str).encode
_root = logging.getLogger()
_LEVELS = {
    logging.DEBUG: "debug",
    logging.INFO: "info",
    logging.WARNING: "warning",
    logging.ERROR: "error",
}


@lru_cache(maxsize=4)
def _second(seconds: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))


def _line(now: float, level: str, node: str, event: str, fields: dict[str, Any]) -> dict[str, Any]:
    time_ = f"{_second(int(now))}.{int(now % 1 * 1000):03d}Z"
    return {"time": time_, "level": level, "node": node, "event": event, **fields}


class _JsonFormatter(logging.Formatter):
    def __init__(self, node: str) -> None:
        super().__init__()
        self._node = node

    def format(self, record: logging.LogRecord) -> str:
        fields = getattr(record, "fields", {})
        line = _line(record.created, record.levelname.lower(), self._node, record.getMessage(), fields)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        try:
            return _encode(line).decode()
        except UnicodeEncodeError:  # names of files may contain bytes that are not UTF-8: json escapes them
            return json.dumps(line, default=str)


class _StderrHandler(logging.Handler):
    """Writes each record to standard error, without a buffer that a full disk would fill."""

    def __init__(self, file: StderrFile | None, node: str) -> None:
        super().__init__()
        self._file = file
        self._node = node
        self._patience = RoomPatience()
        self._lost = 0  # records since the last one that was written
        self._cut = file is not None and file.ends_within_a_line()  # the last line was written in part

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
            loss = self._loss() if self._lost else ""
        except Exception:  # a field whose str() fails must not reach the caller
            self.handleError(record)
            return
        # In a call of its own: if only the record is cut, this loss is not reported again.
        if not loss or self._write(self._after_cut(loss)):
            self._write(self._after_cut(line))

    def write(self, level: str, event: str, fields: dict[str, Any]) -> bool:
        """Write an event without a record of `logging`, at a fraction of its cost. Return False if it needs one."""
        try:
            data = _encode(_line(time.time(), level, self._node, event, fields))
        except Exception:  # `emit` reports it
            return False
        assert self.lock is not None
        with self.lock:
            # Another thread may have lost a line while this one waited for the lock.
            if self._lost or self._cut:
                return False
            self._write(data + b"\n")
        return True

    def _after_cut(self, line: str) -> bytes:
        """Return the bytes of a line, which first ends the last one if that was cut."""
        return ("\n" * self._cut + line + "\n").encode(errors="replace")

    def _write(self, data: bytes) -> bool:
        """Write one line. Return False, and count one more lost record, if it could not be written as a whole."""
        if self._file is not None:
            self._file.make_room(len(data))
        written = 0
        try:
            while written < len(data):
                try:
                    written += os.write(STDERR, data[written:])
                except BlockingIOError:
                    # Once a line is lost, no other one waits until the reader goes on.
                    if self._lost or not self._patience.await_room():
                        raise
        except OSError:
            self._lost += 1
            self._cut = self._cut or written > 0
            return False
        self._lost, self._cut = 0, False
        return True

    def _loss(self) -> str:
        fields = {"lines": self._lost}
        values = {"levelname": "WARNING", "msg": "log lines were lost: stderr could not be written"}
        return self.format(logging.makeLogRecord({**values, "fields": fields}))


class Log:
    """`log.info("request finished", request_id=..., tokens=...)`: an event and its fields."""

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(f"tandem.{name}")

    def debug(self, event: str, **fields: object) -> None:
        self._emit(logging.DEBUG, event, fields)

    def info(self, event: str, **fields: object) -> None:
        self._emit(logging.INFO, event, fields)

    def warning(self, event: str, **fields: object) -> None:
        self._emit(logging.WARNING, event, fields)

    def error(self, event: str, **fields: object) -> None:
        self._emit(logging.ERROR, event, fields)

    def exception(self, event: str, **fields: object) -> None:
        """Log like `error`, with the exception being handled."""
        self._logger.error(event, exc_info=True, extra={"fields": fields})

    def _emit(self, level: int, event: str, fields: dict[str, object]) -> None:
        logger = self._logger
        if logger.isEnabledFor(level):
            handlers = _root.handlers
            only = handlers[0] if len(handlers) == 1 else None
            if isinstance(only, _StderrHandler) and only.write(_LEVELS[level], event, fields):
                return
            # Not by `log`, which looks for the file and line of the caller: nothing shows them.
            record = logger.makeRecord(logger.name, level, "", 0, event, (), None, extra={"fields": fields})
            logger.handle(record)


def configure(node: str, level: str, max_bytes: int | None = None) -> None:
    """Send this process's logs to stderr as JSON lines. Called in __main__, and again once the level is known.

    `max_bytes`: rotate the file of stderr at this size; None: leave it to the process that opened it.
    """
    handler = _StderrHandler(None if max_bytes is None else StderrFile(max_bytes), node)
    handler.setFormatter(_JsonFormatter(node))
    # Nothing shows the thread and process of a record.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    _root.handlers[:] = [handler]
    _root.setLevel(logging.WARNING)
    logging.getLogger("tandem").setLevel(level.upper())
