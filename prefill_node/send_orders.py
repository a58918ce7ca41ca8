"""Decides which pages of which prompt may be sent, and when; a worker carries it out (page_sending.py).

Send orders are separate from plans because a decode node may grant its pages while a forward runs. The worker asks for
orders at the breaks of that forward, after its launch, and after each grant. So pages leave layer by layer, or as soon
as the forward has ended, although no plan could name their destination.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec import structs

from common.engine.state.draft_row import HiddenDtype
from kv_transfer.send_order import SendOrder
from kv_transfer.sending import PageSender
from prefill_node.request import PrefillRequest
from prefill_node.scheduler import Chunk


class SendOrders:
    """Decides what is sent: one order per page, in the order of the prompt."""

    def __init__(
        self, sender: PageSender, page_size: int, hidden_dtype: HiddenDtype, listen: Callable[[], None]
    ) -> None:
        """Decide for transfers of `sender`.

        Args:
            hidden_dtype: dtype name of the draft's hidden states in a record.
            listen: passes messages of decode nodes to the sender. A grant often arrives just after its prompt has
            started.
        """
        self._sender = sender
        self._page_size = page_size
        self._hidden_dtype = hidden_dtype
        self._listen = listen
        self._running = 0
        self._waiting: list[Chunk] = []

    def begin(self, generation: int, chunks: Sequence[Chunk]) -> None:
        """Record that a forward over these chunks is about to run."""
        self._running, self._waiting = generation, list(chunks)

    def of_running(self) -> list[SendOrder]:
        """Return the orders that became possible since the last call, for pages of the forward that was begun last."""
        found: list[SendOrder] = []
        if not self._waiting:
            return found
        self._listen()
        for chunk in list(self._waiting):
            order = self._order(chunk.request, chunk.start + chunk.length, self._running)
            if order is not None:
                self._waiting.remove(chunk)
                if order.pages:
                    found.append(order)
        return found

    def of(self, request: PrefillRequest) -> SendOrder | None:
        """Return an order for all complete pages that have none, and for the record once the first token is drawn.

        Returns None while no decode node has granted pages, after the record, and after the request has ended. The
        event of a grant may come after the record: the sender has the pages as soon as it has read the message.
        """
        if request.recorded:
            return None
        order = self._order(request, request.computed, request.computed_by)
        if order is None or request.computed < request.num_tokens or request.first_token is None:
            return order
        assert request.lease is not None
        request.recorded = True
        return structs.replace(order, record=request.record(self._hidden_dtype), slot=request.lease.slot)

    def _order(self, request: PrefillRequest, computed: int, after: int) -> SendOrder | None:
        slots = self._sender.slots(request.room)
        if slots is None or request.ended:
            return None
        complete = request.complete_pages(computed, self._page_size)
        first, pages = request.take_pages(complete, slots.held_pages)
        return SendOrder(
            room=request.room,
            generation=slots.generation,
            after=after,
            complete=complete,
            first=first,
            pages=pages,
        )
