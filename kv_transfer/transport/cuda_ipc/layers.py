"""Sends pages of a running forward over CUDA IPC: one kernel per layer, or one for all, after an event of its stream.

Layers use a separate lane: the next forward is launched before the results of this one are read, and pages that
are complete by then must not wait for a copy that waits for the next forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain

import torch
from torch import Tensor

from kv_transfer.pair_plan import PairPlan
from kv_transfer.transport.base import PageList, PageWrite, Ticket, WriteState
from kv_transfer.transport.cuda.cudart import Mark
from kv_transfer.transport.cuda.later_digests import LandingDigests, to_host
from kv_transfer.transport.cuda_ipc.writes import LaneTicket, Mapped, PageWriter
from kv_transfer.transport.layers import LayerWrite


class CudaLayers(LayerWrite):
    """Sends all rooms of one peer with one launch per layer; the checksums of a page add up over its planes."""

    def __init__(
        self, writer: PageWriter, peer: Mapped, plan: PairPlan, lists: Sequence[PageList], checksums: bool
    ) -> None:
        self._writer = writer
        self._peer = peer
        self._plan = plan
        self._lists = lists
        self._checksums = checksums
        self._bounds = list(accumulate((len(each.src_pages) for each in lists), initial=0))
        self._sent = 0  # planes
        self._all: tuple[list[int], list[int]] = [], []  # pages of all lists; filled at the first layer
        self._index: Tensor | None = None  # `_all` on the device
        self.sums: Tensor | None = None
        self._closed: Mark | None = None  # after the last layer that was sent
        self._landed: Tensor | None = None  # `sums` on the host, if no plane is left
        self._fault = ""

    @torch.inference_mode()
    def send(self, planes: range) -> None:
        """Launch the copies and return. After a launch that failed nothing more is launched."""
        peer, writer = self._peer, self._writer
        if not peer.attached:
            self._fault = self._fault or "the peer is detached"
        if self._fault:
            return
        try:
            stored = writer.cuda.now(writer.pool.device)
            with peer.layers.entered():
                if self._index is None:
                    self._all[0].extend(chain.from_iterable(each.src_pages for each in self._lists))
                    self._all[1].extend(chain.from_iterable(each.dst_pages for each in self._lists))
                    self._index = writer.page_list(*self._all)
                    self.sums = writer.no_sums(self._bounds[-1]) if self._checksums else None
                    # Made after `wait_for`, the view would wait for the forward.
                    writer.view(peer, self._plan.dst.layout)
                peer.layers.wait_for(stored)
                writer.launch(peer, peer.layers, self._plan, self._all, self._index, self.sums, planes)
        except RuntimeError as error:
            self._fault = str(error)
            return
        self._sent = planes.stop

    @torch.inference_mode()
    def close(self) -> Sequence[Sequence[Ticket]]:
        """Return one ticket, shared by all page lists."""
        peer, nbytes = self._peer, self._bounds[-1] * self._page_bytes(range(self._sent))
        try:
            if self.sums is not None and self._sent == len(self._writer.layout.planes) and peer.attached:
                with peer.layers.entered():
                    self._landed = to_host(self.sums)
            ticket = LaneTicket.on(peer, peer.layers, nbytes, self._fault)
            self._closed = ticket.mark
        except RuntimeError as error:
            self._fault = self._fault or str(error)
            ticket = LaneTicket.failed(peer, peer.layers, nbytes, self._fault)
        return [[ticket] for _ in self._lists]

    @torch.inference_mode()
    def rest(self, number: int) -> PageWrite:
        """Launch what is left, which is nothing if all planes were sent, and return."""
        peer, writer, each = self._peer, self._writer, self._lists[number]
        planes = range(self._sent, len(writer.layout.planes))
        nbytes = len(each.src_pages) * self._plan.page_bytes
        left = len(each.src_pages) * self._page_bytes(planes)
        if not peer.attached or self._fault:
            return PageWrite(LaneTicket.settled(peer, left, WriteState.FAILED), nbytes)
        if not planes and (self._landed is not None or not self._checksums):
            done = LaneTicket.settled(peer, 0, WriteState.DONE)
            return PageWrite(done, nbytes, self._digests_of(number))
        pages = each.src_pages, each.dst_pages
        try:
            with peer.lane.entered():
                sums = self._sums_of(number)
                if planes:
                    writer.launch(peer, peer.lane, self._plan, pages, writer.page_list(*pages), sums, planes)
                sums = None if sums is None else to_host(sums)
            ticket = LaneTicket.on(peer, peer.lane, left, keep=self.sums)
        except RuntimeError as error:
            return PageWrite(LaneTicket.failed(peer, peer.lane, left, str(error), self.sums), nbytes)
        return PageWrite(ticket, nbytes, () if sums is None else LandingDigests(sums))

    def _digests_of(self, number: int) -> Sequence[int]:
        if self._landed is None:
            return ()
        return LandingDigests(self._landed[self._bounds[number] : self._bounds[number + 1]])

    def _sums_of(self, number: int) -> Tensor | None:
        """Return a copy of the sums over the sent layers, to be continued on the other lane."""
        if not self._checksums:
            return None
        if self.sums is None or self._closed is None:
            return self._writer.no_sums(len(self._lists[number].src_pages))
        self._peer.lane.wait_for(self._closed)
        return self.sums[self._bounds[number] : self._bounds[number + 1]].clone()

    def _page_bytes(self, planes: range) -> int:
        parts = (part for plane in planes for part in self._plan.planes[plane])
        return sum(part.src.rows * part.src.length for part in parts)
