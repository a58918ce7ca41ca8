"""One broken invariant."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Violation:
    """A violation. `invariant` is one of I1 to I8 (docs/faults.md); `text` names the request and the fault."""

    invariant: str
    text: str

    def __str__(self) -> str:
        return f"{self.invariant}: {self.text}"
