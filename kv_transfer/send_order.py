"""An order to send pages of one request."""

from __future__ import annotations

import msgspec

from kv_transfer.handoff_record import HandoffRecord


class SendOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Pages of one request, sent to the decode node that has granted room for them."""

    room: int
    generation: int  # generation of the transfer, which identifies the granted pages
    after: int  # generation of the plan that completes the pages; 0 for the prefix cache
    complete: int  # all logical pages below this one are complete then
    first: int  # logical page of pages[0]
    pages: tuple[int, ...]  # this node's pages; each page is in exactly one order
    record: HandoffRecord | None = None  # set in the last order of a request
    slot: int = 0  # own state slot, which leaves before the record; 0: the model keeps no state
