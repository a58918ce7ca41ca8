"""The place of a process among the ranks of its node while it starts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from common.engine.layers.ranks import DivideExperts, Ranks
from common.node.ranks.device_group import PeerRuntime
from common.observability.logs import Log
from common.observability.startup import Progressing


class RankPeers(Progressing, Protocol):
    """The other ranks, with which this one loads a model and agrees on what it serves."""

    def ranks(self, divide_experts: DivideExperts, /) -> Ranks:
        """Return the group that combines what the ranks have computed in a layer."""
        ...

    def connect(self, device: torch.device, runtime: Callable[[], PeerRuntime], log: Log, /) -> None:
        """Connect this rank's device with those of the others, which do so at the same time; before `ranks` is used.

        Raises ConfigError if their GPUs cannot be connected.
        """
        ...

    def exchange(self, own: bytes, /) -> Sequence[bytes]:
        """Give `own`, and return what all ranks give, in their order. Every rank calls it as often as the others."""
        ...
