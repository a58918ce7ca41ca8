"""The only rank of a node with one device, in the place of a RankGroup."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from common.engine.layers.ranks import ONE_RANK, DivideExperts, Ranks
from common.messages.identity import RankTotals
from common.node.ranks.device_group import PeerRuntime
from common.observability.logs import Log
from common.observability.startup import Progressing


class SoleRank:
    """Agrees with itself, and has no processes to watch."""

    def __init__(self, reporter: Progressing) -> None:
        self.report = reporter.report

    def ranks(self, divide_experts: DivideExperts) -> Ranks:
        return ONE_RANK

    def connect(self, device: torch.device, runtime: Callable[[], PeerRuntime], log: Log) -> None:
        """No-op: there is no other device."""

    def exchange(self, own: bytes, /) -> Sequence[bytes]:
        return (own,)

    def starting(self) -> AbstractContextManager[None]:
        return nullcontext()

    def serve(self) -> None:
        """No-op: there is nobody to wait for."""

    def watched(
        self, overdue: Callable[[], float], stopped_limit: float, hung_limit: float, log: Log
    ) -> AbstractContextManager[None]:
        return nullcontext()

    def totals(self) -> Sequence[RankTotals]:
        return ()

    def close(self) -> None:
        """No-op: there are no processes."""
