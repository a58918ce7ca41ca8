"""What a fuzz target is: a function over bytes that raises only where the tested code has a defect."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

EXAMPLES = 150 if "TANDEM_EXPLORE" in os.environ else 60


@dataclass(frozen=True)
class Target:
    """`run` takes any bytes and catches the errors that the tested code documents; `seeds` are valid inputs."""

    run: Callable[[bytes], None]
    seeds: tuple[bytes, ...]
    examples: int = EXAMPLES  # of test_targets.py
