"""Gives each of a fixed number of links the address of another router, out of addresses that come and go."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

# A slot dials an address that is no longer listed for this long, because a draining router is not listed either.
HOLD_SECONDS = 30.0
EPISODE_SECONDS = 10.0  # a dial later than this after the one before is not about the same failure
NONE_FOUND = "no router is found"


class SlotTable:
    """Decides which slot dials which address. The threads of sockets ask, and a source replaces the list.

    No two slots have one address: a router takes two links of one process for one that has dialled again.
    """

    def __init__(self, slots: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._listed: tuple[str, ...] = ()
        self.problem = NONE_FOUND  # why a slot has no address
        self._held: list[str | None] = [None] * slots
        self._failing = [0.0] * slots  # when the slot first dialled an address that is not listed
        self._dialled = [-EPISODE_SECONDS] * slots

    def replace(self, addresses: Sequence[str]) -> None:
        """Set the addresses of all routers. A slot keeps its address until it dials again, so no connection ends."""
        with self._lock:
            self._listed = tuple(dict.fromkeys(addresses))
        self.problem = "each router that is found has another link of this node" if addresses else NONE_FOUND

    def dial(self, slot: int) -> str | None:
        """Return the address that a slot without a connection dials now; None if there is none for it."""
        now = self._clock()
        with self._lock:
            held = self._held[slot]
            again = now - self._dialled[slot] <= EPISODE_SECONDS
            self._dialled[slot] = now
            if held is not None and held in self._listed:
                self._failing[slot] = now
                return held
            if held is not None:
                if not again:
                    self._failing[slot] = now
                if now - self._failing[slot] < HOLD_SECONDS:
                    return held
            self._failing[slot] = now
            self._held[slot] = next((each for each in self._listed if each not in self._held), None)
            return self._held[slot]


class RouterSlot:
    """The addresses of one link, as a Dealer asks for them."""

    def __init__(self, table: SlotTable, index: int, text: str, wake: Callable[[], None]) -> None:
        """`text` names the source; `wake` makes it look again soon."""
        self.text = text
        self._table = table
        self._index = index
        self._wake = wake

    def ask(self) -> None:
        self._wake()

    def next(self) -> str | None:
        return self._table.dial(self._index)

    @property
    def problem(self) -> str:
        return self._table.problem
