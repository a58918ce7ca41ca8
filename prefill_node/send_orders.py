"""Which pages of which prompt may leave, and when: decided here, carried out by a worker (page_sending.py).

Plans and orders are separate, since a decode node may grant its pages while a forward runs: the worker asks for orders
at the breaks of that forward, and so the pages leave layer by layer although no plan has named their destination.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
from msgspec import structs

from common.engine.state.draft_row import HiddenDtype
from kv_transfer.handoff_record import HandoffRecord
from kv_transfer.sender import Sender
from prefill_node.request import PrefillRequest
from prefill_node.scheduler import Chunk


class SendOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Pages of one request, for the decode node that has granted room for them."""

    room: int
    generation: int  # of the transfer: names the granted pages
    after: int  # generation of the plan that completes the pages; 0: the prefix cache held them
    complete: int  # logical pages below this one are complete then, those of earlier orders included
    first: int  # logical page of pages[0]
    pages: tuple[int, ...]  # own pages, each in one order only
    record: HandoffRecord | None = None  # set in the last order of a request


class SendOrders:
    """Decides what leaves. One order per page, in the order of the prompt."""

    def __init__(
        self, sender: Sender, page_size: int, hidden_dtype: HiddenDtype, listen: Callable[[], None]
    ) -> None:
        """Decide for transfers of `sender`.

        Args:
            hidden_dtype: of the draft's hidden states in a record, as a record spells it.
            listen: hands the sender what decode nodes have said. A prompt often begins a moment before its grant.
        """
        self._sender = sender
        self._page_size = page_size
        self._hidden_dtype = hidden_dtype
        self._listen = listen
        self._running = 0
        self._waiting: list[Chunk] = []

    def begin(self, generation: int, chunks: Sequence[Chunk]) -> None:
        """A forward over these chunks is about to run."""
        self._running, self._waiting = generation, list(chunks)

    def at_break(self) -> list[SendOrder]:
        """Return orders for the running forward that were not possible before: all its pages, and earlier ones."""
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
        """Return an order for all complete pages that have none; with the first token drawn, for the record too.

        None while no decode node has granted pages, and once the request has ended.
        """
        order = self._order(request, request.computed, request.computed_by)
        if order is None or request.computed < request.num_tokens or request.first_token is None:
            return order
        return structs.replace(order, record=request.record(self._hidden_dtype))

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
