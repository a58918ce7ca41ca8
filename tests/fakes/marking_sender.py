"""A slow sender that detects writes to pages it was given; its transfers settle when the test says so."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest import mock

import numpy as np

from kv_transfer.copy_plan import Copy
from kv_transfer.pair_plan import PairPlan
from kv_transfer.transport.base import PageList, PageWrite, PeerMemory, Ticket, WriteState
from tests.fakes import loopback
from tests.fakes.loopback import Fabric, Fault, LoopbackSender
from tests.fakes.node_cluster import NodeCluster, Shape


class MarkingSender(LoopbackSender):
    """Flips the lowest bit of every number in the pages that it is given, and checks the marks later.

    A forward that recomputes such a page removes the marks, even if it computes the same values. The change is the
    smallest that a float32 can have, so drafts and tokens are not affected.
    """

    def __init__(self, fabric: Fabric, incarnation: str) -> None:
        super().__init__(fabric, incarnation)
        self._marked: dict[tuple[int, int], bytes] = {}  # (plane, page) -> its marked content
        self._given: dict[tuple[int, int], set[Ticket]] = {}  # (plane, page) -> unsettled writes

    def write_pages(self, peer: PeerMemory, plan: PairPlan, pages: PageList, checksums: bool) -> PageWrite:
        for plane in range(len(self.layout.planes)):
            self._mark(plane, pages.src_pages)
        return super().write_pages(peer, plan, pages, checksums)

    def write(self, peer: PeerMemory, copies: Sequence[Copy], generation: int) -> Ticket:
        given = [(plane, page) for copy in copies for plane, pages in self._pages(copy) for page in pages]
        for plane, page in given:
            self._mark(plane, [page])
        ticket = super().write(peer, copies, generation)
        for each in given:
            self._given.setdefault(each, set()).add(ticket)
        return ticket

    def poll(self, ticket: Ticket) -> WriteState:
        self.check()
        state = super().poll(ticket)
        if state is not WriteState.PENDING:
            for tickets in self._given.values():
                tickets.discard(ticket)
        return state

    def check(self) -> None:
        """Raise AssertionError if a page was written after it was given to this sender."""
        for (plane, page), tickets in self._given.items():
            assert not tickets or self._bytes(plane, page) == self._marked[plane, page], (
                f"page {page} of plane {plane} was written after it was given to the sender"
            )

    @property
    def pages_held(self) -> int:
        """Return the number of pages that writes of this sender still read."""
        return len({page for (_, page), tickets in self._given.items() if tickets})

    def _pages(self, copy: Copy) -> Iterator[tuple[int, range]]:
        plane = max(n for n, each in enumerate(self.layout.planes) if each.offset <= copy.src)
        at, size = self.layout.planes[plane].offset, self.layout.planes[plane].page_bytes
        first = (copy.src - at) // size
        yield plane, range(first, first + copy.length // size)

    def _mark(self, plane: int, pages: Sequence[int]) -> None:
        for page in pages:
            if self._marked.get((plane, page)) != self._bytes(plane, page):
                where = self._slice(plane, page)
                np.frombuffer(self.kv[where], dtype=np.uint32)[:] ^= 1
                self._marked[plane, page] = self._bytes(plane, page)

    def _bytes(self, plane: int, page: int) -> bytes:
        return bytes(self.kv[self._slice(plane, page)])

    def _slice(self, plane: int, page: int) -> slice:
        size = self.layout.planes[plane].page_bytes
        start = self.layout.planes[plane].offset + page * size
        return slice(start, start + size)


class SlowCluster(NodeCluster):
    """A cluster in which nothing that the prefill node sends arrives before `land`, or after `hold`."""

    def __init__(self, shape: Shape) -> None:
        with mock.patch.object(loopback, "LoopbackSender", MarkingSender):
            super().__init__(shape)
        self.hold()

    def hold(self) -> None:
        """Stop everything that is posted from now on from arriving."""
        self.fabric.plan = lambda n: Fault(damage="stick")

    @property
    def endpoint(self) -> MarkingSender:
        endpoint = self.prefill.sender.endpoint
        assert isinstance(endpoint, MarkingSender)
        return endpoint

    def land(self) -> None:
        """Let everything arrive from now on."""
        self.endpoint.check()
        self.fabric.plan = lambda n: Fault()
        self.fabric.unstick()


@contextmanager
def slow(shape: Shape) -> Iterator[SlowCluster]:
    with SlowCluster(shape) as cluster:
        assert isinstance(cluster, SlowCluster)
        yield cluster
