"""The worker of a node with several ranks: rank 0 sends every plan to the others and carries it out itself."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from common.node.ranks.checked_launch import CheckedLaunch
from kv_transfer.send_order import SendOrder
from prefill_node.ranked_host import ComparedByAll, OtherVerdicts
from prefill_node.step_plan import PromptPlan
from prefill_node.step_result import Launched, Worker


class RankedWorker:
    """Carries out plans on rank 0, whose results are read, and on all others.

    Send orders reach the other ranks separately, because a plan cannot name destinations that are granted later.
    """

    def __init__(
        self,
        first: Worker,
        send_plan: Callable[[bytes], None],
        verdicts: OtherVerdicts,
        check: Callable[[], None],
    ) -> None:
        """Carry out plans with `first`, the worker of rank 0, and send them to the others with `send_plan`.

        Args:
            verdicts: what the others say about their loads.
            check: raises RankFailed if a collective of a complete plan has failed.
        """
        self._first = first
        self._send_plan = send_plan
        self._verdicts = verdicts
        self._check = check
        self._loaded = 0  # plans with loads
        self._encoder = msgspec.msgpack.Encoder()

    def apply(self, plan: PromptPlan) -> Launched:
        self._send_plan(self._encoder.encode(plan))
        launched = self._first.apply(plan)
        if loads := plan.loads:
            launched = ComparedByAll(launched, loads, self._verdicts, self._loaded)
            self._loaded += 1
        return CheckedLaunch(launched, self._check)

    def granted(self) -> None:
        self._first.granted()

    def send(self, order: SendOrder) -> None:
        self._first.send(order)
