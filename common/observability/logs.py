"""One JSON object per line on stderr: time, level, node, event, and the fields of the call (room, request_id, ...).

A log that cannot be written never stops serving: errors of the stream are swallowed by logging itself.
"""

from __future__ import annotations

import logging
import sys
import time
from typing import Any

import msgspec

_encode = msgspec.json.Encoder(enc_hook=str).encode


class _JsonFormatter(logging.Formatter):
    def __init__(self, node: str) -> None:
        super().__init__()
        self._node = node

    def format(self, record: logging.LogRecord) -> str:
        wall = time.gmtime(record.created)
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", wall) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "node": self._node,
            "event": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return _encode(line).decode()


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
        """As error, with the exception being handled."""
        self._logger.error(event, exc_info=True, extra={"fields": fields})

    def _emit(self, level: int, event: str, fields: dict[str, object]) -> None:
        if self._logger.isEnabledFor(level):
            self._logger.log(level, event, extra={"fields": fields})


def configure(node: str, level: str) -> None:
    """Send this process's logs to stderr as JSON lines. Call once, in __main__."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter(node))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("tandem").setLevel(level.upper())
