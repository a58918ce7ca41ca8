"""Counts the calls that the product makes into the system, a library or a fake, and lets one of them fail."""

from __future__ import annotations

import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

PRODUCT = ("common", "decode_node", "kv_transfer", "prefill_node")
EXPLORE = "TANDEM_EXPLORE" in os.environ  # let every call fail, not only some


class FailingCalls:
    """Runs an action before one call, which has failed if that raises. Calls of other packages do not count."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.reached = False  # whether the action was run
        self._at = ("", 0)
        self._action: Callable[[], object] = _nothing
        self._lock = threading.Lock()

    def arm(self, name: str, number: int, action: Callable[[], object]) -> None:
        """Begin to count, and run `action` before the call of `name` with this number, from 1."""
        self.counts.clear()
        self.reached, self._at, self._action = False, (name, number), action

    def disarm(self) -> None:
        self._at = ("", 0)

    def watch(self, patch: pytest.MonkeyPatch, owner: Any, attribute: str) -> str:
        """Count the calls of a function or method until `patch` is undone; return their name."""
        real, name = getattr(owner, attribute), f"{owner.__name__}.{attribute}"

        def watched(*args: Any, **kwargs: Any) -> Any:
            if sys._getframe(1).f_globals["__name__"].partition(".")[0] in PRODUCT:
                self._count(name)
            return real(*args, **kwargs)

        patch.setattr(owner, attribute, watched)
        return name

    def _count(self, name: str) -> None:
        with self._lock:
            self.counts[name] += 1
            due = self._at == (name, self.counts[name])
        if due:
            self.reached = True
            self._action()


def fail_with(error: Callable[[], BaseException]) -> Callable[[], object]:
    """Return an action that raises a new `error()`."""

    def action() -> None:
        raise error()

    return action


def numbers(count: int, most: int) -> Iterator[int]:
    """Yield the numbers of the calls to let fail, of `count`: at most `most` at equal distances, or all."""
    if EXPLORE:
        yield from range(1, count + 1)
    else:
        yield from sorted({1 + count * (2 * place + 1) // (2 * most) for place in range(most)} - {count + 1})


def _nothing() -> None:
    pass
