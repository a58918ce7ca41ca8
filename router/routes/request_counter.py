"""Counts requests in progress."""

from __future__ import annotations

from types import TracebackType


class RequestCounter:
    """`with active:` around each request. A draining router waits until `count` is 0."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> None:
        self.count += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.count -= 1
