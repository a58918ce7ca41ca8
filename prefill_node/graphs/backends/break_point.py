"""Marks a function at which a breakable graph is interrupted: it runs eagerly between two segments.

The function reads what it needs of the live batch from the object that it is a method of (an attention backend that
has planned the batch), not from captured arguments. Its tensor arguments are padded: it must accept more rows than
are live and leave the other rows unchanged. It returns one new tensor or None; if it has a parameter `out`, replay
passes the tensor to write into, which saves a copy.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, ParamSpec, Protocol, TypeVar

from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R", Tensor, None)


class BreakHandler(Protocol):
    """A capture in progress."""

    def take_break(
        self, function: Callable[..., Tensor | None], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Tensor | None: ...

    def next_segment(self) -> None: ...


_active: ContextVar[BreakHandler | None] = ContextVar("break_handler", default=None)


def break_point(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a break point. Outside a breakable capture it is a plain call."""

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        handler = _active.get()
        if handler is None:
            return function(*args, **kwargs)
        result: Any = handler.take_break(function, args, kwargs)
        answer: R = result
        return answer

    return wrapper


def next_segment() -> None:
    """End the segment of a breakable capture and begin the next one; elsewhere do nothing.

    The device begins with a segment once it has all of it, so a short first one lets it begin sooner.
    """
    handler = _active.get()
    if handler is not None:
        handler.next_segment()


@contextmanager
def breaking(handler: BreakHandler) -> Iterator[None]:
    """Pass break points to `handler` in this context."""
    token = _active.set(handler)
    try:
        yield
    finally:
        _active.reset(token)
