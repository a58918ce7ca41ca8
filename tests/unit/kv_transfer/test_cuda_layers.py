"""Pages of a running forward over CUDA IPC, on a runtime of host memory: launches, events, tickets, checksums."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import pytest
import torch

from kv_transfer.transport.base import PageList, WriteState
from kv_transfer.transport.cuda_ipc.layers import CudaLayers
from kv_transfer.transport.cuda_ipc.writes import Mapped
from tests.unit.kv_transfer.test_cuda_ipc import DST, PLAN, SRC, Pair

LISTS = [PageList([1, 2], [3, 9], 1), PageList([5], [4], 2)]  # for two rooms


@pytest.mark.parametrize("checksums", [True, False])
@pytest.mark.parametrize("peer_access", [True, False])
def test_layers_are_copied_after_their_events(
    monkeypatch: pytest.MonkeyPatch, peer_access: bool, checksums: bool
) -> None:
    """Each layer is one launch for both rooms, after the computing stream has stored it; the rest goes room by room."""
    pair = Pair(monkeypatch, (0, 1), peer_access=peer_access)
    peer = pair.sending.attach(pair.target())
    lane, layers = pair.cuda.lanes[-2:]
    with torch.inference_mode():  # as in a forward
        write = pair.sending.write_layers(peer, PLAN, LISTS, checksums)
        assert layers.events == []
        write.send(range(2))
    assert layers.events == [1]
    assert _first_differing_plane(pair, 2, 9) == _first_differing_plane(pair, 5, 4) == 2
    (ticket,), (other,) = write.close()
    assert ticket is other
    assert pair.sending.poll(ticket) is WriteState.DONE
    for number, pages in enumerate(LISTS):
        assert not pair.equal(pages.src_pages[0], pages.dst_pages[0])
        rest = write.rest(number)
        assert pair.sending.poll(rest.ticket) is WriteState.DONE
        assert all(pair.equal(src, dst) for src, dst in zip(pages.src_pages, pages.dst_pages))
        assert rest.nbytes == len(pages.src_pages) * SRC.page_bytes
        assert list(rest.digests) == (
            pair.sending.page_digests(PLAN.src, pages.src_pages) if checksums else []
        )
    assert layers.events == [1], "the forward has ended: nothing waits for the stream of the next one"
    assert [event.lane for event in lane.events] == [layers] * (2 if checksums else 0), (
        "two events order the checksums"
    )
    assert pair.sending.progress(peer) == 3 * SRC.page_bytes
    pair.close()


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    made = Pair(monkeypatch)
    yield made
    made.close()


def _first_differing_plane(pair: Pair, src: int, dst: int) -> int:
    ours, theirs = (
        [memory[p.offset + page * p.page_bytes :][: p.page_bytes] for p in shape.planes]
        for memory, shape, page in ((pair.source, SRC, src), (pair.pool, DST, dst))
    )
    return [torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)].index(False)


def test_where_all_layers_have_left_nothing_is_launched(pair: Pair) -> None:
    peer = pair.sending.attach(pair.target())
    lane = pair.cuda.lanes[-2]
    for checksums in (False, True):
        write = pair.sending.write_layers(peer, PLAN, LISTS, checksums)
        for layer in range(2):
            write.send(range(2 * layer, 2 * layer + 2))
        write.close()
        lane.launch_fault = "nothing may be launched"
        rest = write.rest(1)
        assert pair.sending.poll(rest.ticket) is WriteState.DONE
        assert rest.nbytes == SRC.page_bytes
        assert list(rest.digests) == (pair.sending.page_digests(PLAN.src, [5]) if checksums else [])
        lane.launch_fault = ""


def test_a_launch_that_fails_between_two_layers(pair: Pair) -> None:
    """The forward continues, nothing more is launched, and the rooms fail once launched copies have settled."""
    peer = pair.sending.attach(pair.target())
    lane = pair.cuda.lanes[-1]  # the one of layers
    write = pair.sending.write_layers(peer, PLAN, LISTS, True)
    write.send(range(2))
    lane.held, lane.launch_fault = True, "CUDA error: unspecified launch failure"
    write.send(range(2, 4))
    lane.launch_fault = ""
    write.send(range(4, 6))
    assert lane.events == [1]
    ((ticket,), _) = write.close()
    assert pair.sending.poll(ticket) is WriteState.PENDING
    lane.held = False
    assert pair.sending.poll(ticket) is WriteState.FAILED
    assert "unspecified launch failure" in pair.sending.last_error(peer)
    assert pair.sending.progress(peer) == 0
    assert pair.sending.poll(write.rest(0).ticket) is WriteState.FAILED


def test_complete_pages_do_not_wait_for_the_next_forward(pair: Pair) -> None:
    """Forward 2 is launched before the rest of forward 1 is sent: its room need not wait for forward 2."""
    peer = pair.sending.attach(pair.target())
    layers = pair.cuda.lanes[-1]
    first, second = (pair.sending.write_layers(peer, PLAN, [pages], True) for pages in LISTS)
    first.send(range(2))
    ((done,),) = first.close()
    assert pair.sending.poll(done) is WriteState.DONE
    layers.held = True
    second.send(range(4))
    ((pending,),) = second.close()
    whole = pair.sending.write_pages(peer, PLAN, PageList([7], [7], 1), True)
    for write in (first.rest(0), whole):
        assert pair.sending.poll(write.ticket) is WriteState.DONE
    assert pair.sending.poll(pending) is WriteState.PENDING
    layers.held = False
    assert pair.sending.poll(pending) is WriteState.DONE


def test_a_first_layer_does_not_wait_for_the_forward(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The converted layout of a peer is copied to the GPU before the stream waits for the forward."""
    peer = pair.sending.attach(pair.target())
    assert isinstance(peer, Mapped)
    made: list[bool] = []
    monkeypatch.setattr(pair.cuda.lanes[-1], "wait_for", lambda _: made.append(peer.pages is not None))
    pair.sending.write_layers(peer, PLAN, LISTS, True).send(range(2))
    assert made == [True]


def test_a_peer_is_detached_during_a_launch(pair: Pair) -> None:
    """Copies without a ticket end before the memory is unmapped, and nothing is copied after that."""
    peer = pair.sending.attach(pair.target())
    layers = pair.cuda.lanes[-1]
    write = pair.sending.write_layers(peer, PLAN, LISTS, False)
    write.send(range(2))
    layers.held = True
    pair.sending.detach(peer)
    assert layers.waited == 1
    write.send(range(2, 4))
    assert layers.events == [1]
    ((ticket,), _) = write.close()
    assert pair.sending.poll(ticket) is WriteState.FAILED
    assert pair.sending.poll(write.rest(1).ticket) is WriteState.FAILED


def test_sums_of_layers_live_until_the_other_lane_has_read_them(pair: Pair) -> None:
    """A write is released with its room, but no forward may reuse its checksums before they are read."""
    peer = pair.sending.attach(pair.target())
    lane = pair.cuda.lanes[-2]
    write = pair.sending.write_layers(peer, PLAN, LISTS, True)
    write.send(range(2))
    write.close()
    assert isinstance(write, CudaLayers)
    assert write.sums is not None
    sums = weakref.ref(write.sums)
    lane.held = True
    ticket = write.rest(0).ticket
    del write
    assert sums() is not None
    assert pair.sending.poll(ticket) is WriteState.PENDING
    lane.held = False
    assert pair.sending.poll(ticket) is WriteState.DONE
    assert sums() is None
