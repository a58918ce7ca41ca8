"""One broken invariant."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Violation:
    """`invariant` is I1 to I8 of RELIABILITY.md, `text` names the request and what is wrong."""

    invariant: str
    text: str

    def __str__(self) -> str:
        return f"{self.invariant}: {self.text}"
