"""A lane to host memory whose copies end when the test says so, as those of a busy GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from common.node.overlap import Completion
from decode_node.backups import Backup


@dataclass(slots=True)
class LateCopy:
    """A copy in progress. Its target holds noise, and its source must stay as it was."""

    target: Backup
    source: list[torch.Tensor]  # at the start
    again: Callable[[], Backup]
    asks: int | None  # number of questions after which it ends by itself
    done: bool = False
    asked: int = 0

    def due(self) -> bool:
        return True

    def ready(self) -> bool:
        self.asked += 1
        if not self.done and self.asks is not None and self.asked > self.asks:
            self.finish()
        return self.done

    def wait(self, meanwhile: Callable[[], None] | None = None) -> None:
        raise AssertionError("nothing waits for a save")

    def finish(self) -> None:
        """Copy now. Raises AssertionError if what is copied was reused since the start."""
        for target, before, now in zip(
            self.target.tensors(), self.source, self.again().tensors(), strict=True
        ):
            assert torch.equal(now, before), "it was reused before it was saved"
            target.copy_(now)
        self.done = True


class LateLane:
    """See the module docstring. With `asks`, a copy ends by itself once the node has asked for it this many times."""

    def __init__(self, asks: int | None = None) -> None:
        self.asks = asks
        self.copies: list[LateCopy] = []

    @property
    def unfinished(self) -> list[LateCopy]:
        return [each for each in self.copies if not each.done]

    def start(self, copy: Callable[[], Any]) -> tuple[Any, Completion]:
        target = copy()
        made = LateCopy(target, [tensor.clone() for tensor in target.tensors()], copy, self.asks)
        for tensor in target.tensors():
            tensor.view(torch.uint8).random_() if tensor.dim() else tensor.fill_(1)
        self.copies.append(made)
        return target, made

    def follow(self) -> None:
        self.finish()

    def finish(self) -> None:
        for each in self.unfinished:
            each.finish()
