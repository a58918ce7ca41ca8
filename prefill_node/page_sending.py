"""Carries out send orders: after the forward that completes the pages, or layer by layer while it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

from kv_transfer.layer_send import RoomPages
from kv_transfer.ranks.sender_group import SenderGroup
from kv_transfer.ranks.sender_rank import SenderRank
from kv_transfer.send_order import SendOrder
from kv_transfer.sender import Sender
from prefill_node.signalled_attention import SignalledAttention
from prefill_node.step_plan import PromptPlan

Orders = Callable[[], Sequence[SendOrder]]


class PageSending(Protocol):
    """The worker's end of all transfers."""

    def during(self, plan: PromptPlan) -> AbstractContextManager[None]:
        """Return a context for the launch of the plan's forward; its pages may be sent inside it."""
        ...

    def granted(self) -> None:
        """Send pages of the forward that was launched last whose decode nodes have granted theirs since then."""
        ...

    def send(self, order: SendOrder) -> None:
        """Send complete pages, and the rest of those that are being sent layer by layer."""
        ...


class ByChunk:
    """Sends pages once they are complete."""

    def __init__(self, sender: Sender) -> None:
        self._sender = sender

    def during(self, plan: PromptPlan) -> AbstractContextManager[None]:
        return nullcontext()

    def granted(self) -> None:
        """No-op: pages of a running forward are not complete."""

    def send(self, order: SendOrder) -> None:
        self._sender.complete(order.room, order.complete)
        if order.pages:
            self._sender.send_pages(order.room, order.pages, order.first)
        if order.record is not None:
            self._sender.finish(order.room, order.record, order.slot)


class QueuedByChunk(ByChunk):
    """Launches the copies right after the forward, so that the device begins them before the host sees its end."""

    def __init__(self, sender: Sender, orders: Orders) -> None:
        super().__init__(sender)
        self._orders = orders

    @contextmanager
    def during(self, plan: PromptPlan) -> Iterator[None]:
        yield
        self.granted()

    def granted(self) -> None:
        if orders := self._orders():
            send = self._sender.follow()
            try:
                send.add(_room_pages(orders))
                send.queue_rest()
            finally:
                send.close()


class ByLayer:
    """Sends each layer's keys and values as soon as they are stored, to decode nodes that have granted pages by then.

    Used only where attention runs eagerly: a graph without breaks finishes too soon for this to help.
    """

    def __init__(
        self, attention: SignalledAttention, sender: Sender, orders: Orders, rest: PageSending
    ) -> None:
        """`rest` sends the pages of which no layer was sent."""
        self._attention = attention
        self._sender = sender
        self._orders = orders
        self._rest = rest

    def send(self, order: SendOrder) -> None:
        self._rest.send(order)

    def granted(self) -> None:
        self._rest.granted()

    @contextmanager
    def during(self, plan: PromptPlan) -> Iterator[None]:
        send = self._sender.follow()

        def stored(layer: int) -> None:
            orders = self._orders()
            assert all(order.after == plan.generation for order in orders), "pages of another forward"
            send.add(_room_pages(orders))
            send.stored(layer)

        with self._rest.during(plan), self._attention.heard_by(stored):
            try:
                yield
                if self._sender.endpoint.waits_for_stream:
                    send.queue_rest()
            finally:
                send.close()


def page_sending(sender: Sender, attention: SignalledAttention | None, orders: Orders) -> ByChunk | ByLayer:
    """Return what carries out the orders of one rank, as early as its transport can send.

    Args:
        attention: announces layers, if pages are to be sent layer by layer.
        orders: returns the new orders for pages of the running forward, each order once.
    """
    whole = QueuedByChunk(sender, orders) if sender.endpoint.waits_for_stream else ByChunk(sender)
    return whole if attention is None else ByLayer(attention, sender, orders, whole)


def _room_pages(orders: Sequence[SendOrder]) -> list[RoomPages]:
    return [RoomPages(order.room, order.pages, order.first) for order in orders]


class GroupPageSending:
    """Sends the pages of rank 0, and tells the node's other ranks to send theirs."""

    def __init__(self, own: PageSending, group: SenderGroup) -> None:
        self._own = own
        self._group = group

    def during(self, plan: PromptPlan) -> AbstractContextManager[None]:
        return self._own.during(plan)

    def granted(self) -> None:
        self._own.granted()

    def send(self, order: SendOrder) -> None:
        self._group.order(order)
        self._own.send(order)


def given_to_all(group: SenderGroup, orders: Orders) -> Sequence[SendOrder]:
    """Return the new orders for the running forward after giving them to the other ranks."""
    found = orders()
    for order in found:
        group.order(order)
    return found


class RankPageSending:
    """Sends on a rank other than rank 0, whose orders come through `rank`; `own` asks it at the breaks."""

    def __init__(self, own: PageSending, rank: SenderRank) -> None:
        self._own = own
        self._rank = rank

    def during(self, plan: PromptPlan) -> AbstractContextManager[None]:
        self._rank.begin(plan.generation)
        return self._own.during(plan)

    def granted(self) -> None:
        self._own.granted()

    def send(self, order: SendOrder) -> None:
        self._own.send(order)
