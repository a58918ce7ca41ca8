"""One JSON object per line on stderr: time, level, node, event, and the fields of the call (room, request_id, ...).

A log that cannot be written (a full disk, a closed pipe) never stops a process: lost lines are counted, and their
number is logged once writing works again.
"""

from __future__ import annotations

import logging
import os
import time
from functools import lru_cache
from typing import Any

import msgspec

from common.observability.stderr_file import STDERR, StderrFile

_encode = msgspec.json.Encoder(enc_hook=str).encode


@lru_cache(maxsize=4)
def _second(seconds: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))


class _JsonFormatter(logging.Formatter):
    def __init__(self, node: str) -> None:
        super().__init__()
        self._node = node

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": f"{_second(int(record.created))}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "node": self._node,
            "event": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return _encode(line).decode()


class _StderrHandler(logging.Handler):
    """Writes each record to standard error in one call, without a buffer that a full disk would fill."""

    def __init__(self, file: StderrFile | None) -> None:
        super().__init__()
        self._file = file
        self._lost = 0  # records since the last one that was written
        self._cut = file is not None and file.ends_within_a_line()  # the last line was written in part

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
            if self._lost:
                line = f"{self._loss()}\n{line}"
        except Exception:  # a field whose str() fails must not reach the caller
            self.handleError(record)
            return
        self._write(("\n" * self._cut + line + "\n").encode(errors="replace"))

    def _write(self, data: bytes) -> None:
        if self._file is not None:
            self._file.make_room(len(data))
        written = 0
        try:
            while written < len(data):
                written += os.write(STDERR, data[written:])
        except OSError:
            self._lost += 1
            self._cut = self._cut or written > 0
        else:
            self._lost, self._cut = 0, False

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
        if self._logger.isEnabledFor(level):
            # Not by `log`, which looks for the file and line of the caller: nothing shows them.
            logger = self._logger
            record = logger.makeRecord(logger.name, level, "", 0, event, (), None, extra={"fields": fields})
            logger.handle(record)


def configure(node: str, level: str, max_bytes: int | None = None) -> None:
    """Send this process's logs to stderr as JSON lines. Called in __main__, and again once the level is known.

    `max_bytes`: rotate the file of stderr at this size; None: leave it to the process that opened it.
    """
    handler = _StderrHandler(None if max_bytes is None else StderrFile(max_bytes))
    handler.setFormatter(_JsonFormatter(node))
    # Nothing shows the thread and process of a record.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("tandem").setLevel(level.upper())
