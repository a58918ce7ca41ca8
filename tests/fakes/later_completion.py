"""The completion of work that ends when somebody waits for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from common.node.completion import Immediate


@dataclass
class LaterCompletion(Immediate):
    """Complete once `done`, which a wait sets."""

    done: bool = False

    def ready(self) -> bool:
        return self.done

    def wait(self, meanwhile: Callable[[], None] | None = None) -> None:
        self.done = True
