"""The interface of transports that send pages layer by layer while a forward computes them.

    write_layers ──> send (planes of a layer, once they are stored) ... ──> close (the forward is launched)
                                                      per room, when the forward has ended ──> rest

None of these calls waits for the forward. `rest` is not called for a room that ends before it: the tickets of `close`
say when its pages are no longer being written.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from kv_transfer.copy_plan import copies, runs
from kv_transfer.pair_plan import PairPlan
from kv_transfer.transport.base import PageList, PageWrite, PeerMemory, SenderEndpoint, Ticket


class LayerWrite(ABC):
    """Pages of rooms of one peer. `number` is the index of a room's page list in the argument of `write_layers`."""

    @abstractmethod
    def send(self, planes: range) -> None:
        """Start copying these planes, which follow the previous ones.

        They are complete once the computing stream reaches its present end.
        """

    @abstractmethod
    def close(self) -> Sequence[Sequence[Ticket]]:
        """End the sending of layers.

        Returns the tickets of the sent planes per page list; lists may share tickets.
        """

    @abstractmethod
    def rest(self, number: int) -> PageWrite:
        """Write the remaining planes, after `close` and the forward. `nbytes` and `digests` cover all planes."""


class LayerEndpoint(SenderEndpoint):
    """A transport that can begin to send pages before they are complete."""

    @abstractmethod
    def write_layers(
        self, peer: PeerMemory, plan: PairPlan, lists: Sequence[PageList], checksums: bool
    ) -> LayerWrite:
        """Prepare the write; copies nothing yet. A fault is a FAILED ticket of `close` or `rest`."""

    def write_pages(self, peer: PeerMemory, plan: PairPlan, pages: PageList, checksums: bool) -> PageWrite:
        """Write complete pages: all planes are the rest of a write of which no layer was sent."""
        return self.write_layers(peer, plan, [pages], checksums).rest(0)


class HostEndpoint(LayerEndpoint):
    """Copies from host memory by `write`: on the CPU a layer that a forward has stored is complete."""

    def write_layers(
        self, peer: PeerMemory, plan: PairPlan, lists: Sequence[PageList], checksums: bool
    ) -> LayerWrite:
        return _HostLayers(self, peer, plan, lists, checksums)


class _HostLayers(LayerWrite):
    def __init__(
        self,
        endpoint: SenderEndpoint,
        peer: PeerMemory,
        plan: PairPlan,
        lists: Sequence[PageList],
        checksums: bool,
    ) -> None:
        self._endpoint = endpoint
        self._peer = peer
        self._plan = plan
        self._lists = lists
        self._checksums = checksums
        self._runs = [runs(each.src_pages, each.dst_pages) for each in lists]
        self._tickets: list[list[Ticket]] = [[] for _ in lists]
        self._nbytes = [0 for _ in lists]
        self._sent = 0  # planes

    def send(self, planes: range) -> None:
        for number in range(len(self._lists)):
            self._tickets[number].append(self._write(number, slice(planes.start, planes.stop)))
        self._sent = planes.stop

    def close(self) -> Sequence[Sequence[Ticket]]:
        return self._tickets

    def rest(self, number: int) -> PageWrite:
        ticket = self._write(number, slice(self._sent, None))
        pages = self._lists[number].src_pages
        digests = self._endpoint.page_digests(self._plan.src, pages) if self._checksums else ()
        return PageWrite(ticket, self._nbytes[number], digests)

    def _write(self, number: int, planes: slice) -> Ticket:
        found = copies(self._plan, self._runs[number], planes)
        self._nbytes[number] += sum(copy.nbytes for copy in found)
        return self._endpoint.write(self._peer, found, self._lists[number].generation)
