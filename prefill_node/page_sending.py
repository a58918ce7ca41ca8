"""Carries out send orders: after the forward that completes the pages, or layer by layer while it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

from kv_transfer.layer_send import RoomPages
from kv_transfer.sender import Sender
from prefill_node.send_orders import SendOrder
from prefill_node.signalled_attention import SignalledAttention
from prefill_node.step_plan import PromptPlan


class PageSending(Protocol):
    """The worker's end of all transfers."""

    def during(self, plan: PromptPlan) -> AbstractContextManager[None]:
        """Return a context for the launch of the plan's forward; its pages may be sent inside it."""
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

    def send(self, order: SendOrder) -> None:
        self._sender.complete(order.room, order.complete)
        if order.pages:
            self._sender.send_pages(order.room, order.pages, order.first)
        if order.record is not None:
            self._sender.finish(order.room, order.record, order.slot)


class ByLayer:
    """Sends each layer's keys and values as soon as they are stored, to decode nodes that have granted pages by then.

    Used only where attention runs eagerly: a graph without breaks finishes too soon for this to help.
    """

    def __init__(
        self, attention: SignalledAttention, sender: Sender, orders: Callable[[], Sequence[SendOrder]]
    ) -> None:
        """`orders` returns the new orders for pages of the running forward, each order once."""
        self._attention = attention
        self._sender = sender
        self._orders = orders
        self._whole = ByChunk(sender)

    def send(self, order: SendOrder) -> None:
        self._whole.send(order)

    @contextmanager
    def during(self, plan: PromptPlan) -> Iterator[None]:
        send = self._sender.follow()

        def stored(layer: int) -> None:
            orders = self._orders()
            assert all(order.after == plan.generation for order in orders), "pages of another forward"
            send.add([RoomPages(order.room, order.pages, order.first) for order in orders])
            send.stored(layer)

        with self._attention.heard_by(stored):
            try:
                yield
            finally:
                send.close()
