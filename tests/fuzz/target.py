"""What a fuzz target is: a function over bytes that raises only where the tested code has a defect."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Target:
    """`run` takes any bytes and catches the errors that the tested code documents; `seeds` are valid inputs."""

    run: Callable[[bytes], None]
    seeds: tuple[bytes, ...]
    examples: int = 150  # in CI
