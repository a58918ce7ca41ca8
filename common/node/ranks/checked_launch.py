"""A launched plan whose results are read only if all ranks have taken part in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from common.node.overlap import Completion

Result = TypeVar("Result", covariant=True)


class Readable(Protocol[Result]):
    """A launched plan."""

    @property
    def completion(self) -> Completion: ...

    def read(self) -> Result: ...


@dataclass(frozen=True, slots=True)
class CheckedLaunch(Generic[Result]):
    """A launched plan that all ranks of a node execute together, each its own part."""

    launched: Readable[Result]
    check: Callable[[], None]  # raises RankFailed if a collective has failed

    @property
    def completion(self) -> Completion:
        return self.launched.completion

    def read(self) -> Result:
        """Return the results. Raises RankFailed if they were computed without the part of some rank."""
        self.check()
        return self.launched.read()
