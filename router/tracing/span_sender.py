"""Exports spans from a separate thread, so that a slow or dead collector costs the event loop nothing."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter

from common.observability.logs import Log

MAX_QUEUED = 16_384  # spans; further ones are dropped
BATCH = 512
INTERVAL = 1.0  # longest time until a span is exported, in seconds


class SpanSender:
    """A bounded queue of spans. `put` is called by one thread and never blocks."""

    def __init__(self, exporter: SpanExporter, log: Log) -> None:
        """`exporter`: its `export` may take seconds, but has to return. Only the thread here calls it."""
        self._exporter = exporter
        self._log = log
        self._queue: deque[ReadableSpan] = deque()
        self._dropped = 0  # since the last line about it
        self._awake = threading.Event()
        self._closed = False
        self._until = float("inf")  # monotonic seconds; no export begins later
        self._thread = threading.Thread(target=self._run, name="spans", daemon=True)
        self._thread.start()

    def put(self, spans: Iterable[ReadableSpan]) -> None:
        """Queue the spans of one request, or none of them if the queue is full."""
        if len(self._queue) >= MAX_QUEUED:
            self._dropped += 1
            return
        # A list: the thread must not take the first spans of a request while the others are being made.
        self._queue.extend(list(spans))
        if len(self._queue) >= BATCH:
            self._awake.set()

    def close(self, seconds: float) -> None:
        """Export what is left, for at most this many seconds; then drop it. An export in progress goes on by itself."""
        self._until = time.monotonic() + seconds
        self._closed = True
        self._awake.set()
        self._thread.join(seconds)

    def _run(self) -> None:
        closed = False
        while not closed:
            self._awake.wait(INTERVAL)
            self._awake.clear()
            # Read before the queue: what was put before `close` is exported.
            closed = self._closed
            while self._queue and time.monotonic() < self._until:
                count = min(len(self._queue), BATCH)
                self._export([self._queue.popleft() for _ in range(count)])
            if self._dropped:
                self._log.warning("dropped traces: the collector is too slow", requests=self._dropped)
                self._dropped = 0
        if self._queue:
            self._log.warning(
                "dropped spans: the collector did not take them before the end", spans=len(self._queue)
            )
        self._exporter.shutdown()

    def _export(self, spans: Sequence[ReadableSpan]) -> None:
        try:
            self._exporter.export(spans)
        except Exception as error:
            # One span may be impossible to encode: later ones must not be lost with it.
            self._log.warning("cannot export spans", spans=len(spans), reason=str(error))
