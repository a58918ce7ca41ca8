"""Pages sent layer by layer during a forward: every plane once, the record after all, faults in between."""

from __future__ import annotations

import secrets
from collections import Counter

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.config.schema import Cluster, Model, Transfer
from common.config.transport_choice import choose_layers
from common.errors import ConfigError, InternalError
from kv_transfer.copy_plan import copies, runs
from kv_transfer.events import Arrived, Delivered, PagesFree, RoomFailed, TransferLost
from kv_transfer.handoff_record import HandoffRecord
from kv_transfer.layer_send import LayerSend, RoomPages
from kv_transfer.pair_plan import pair_plan
from kv_transfer.transport.base import Region
from kv_transfer.transport.cuda_ipc.sender import CudaIpcSender
from kv_transfer.transport.layers import LayerEndpoint
from kv_transfer.transport.nixl.sender import NixlSender
from kv_transfer.transport.shm.receiver import ShmReceiver
from kv_transfer.transport.shm.sender import ShmSender
from kv_transfer.transport.tcp.sender import TcpSender
from tests.fakes.loopback import Fault
from tests.unit.kv_transfer.rig import LIMITS, RECORD, Clock, Decode, Prefill, layout, page_bytes, same_pages
from tests.unit.kv_transfer.test_faults import Rig

SRC, DST = [7, 2, 3], [4, 5, 9]


def planes_there(rig: Rig, src: int, dst: int) -> list[bool]:
    """Return which planes of a page have landed."""
    halves = [page_bytes(end.kv, end.layout, page) for end, page in ((rig.prefill, src), (rig.decode, dst))]
    size = rig.prefill.layout.planes[0].page_bytes
    return [halves[0][at : at + size] == halves[1][at : at + size] for at in range(0, 4 * size, size)]


def begin(rig: Rig, src: list[int] = SRC, dst: list[int] = DST, room: int = 1) -> LayerSend:
    rig.begin(room, tuple(dst))
    return follow(rig, RoomPages(room, src, 0))


def follow(rig: Rig, *pages: RoomPages) -> LayerSend:
    send = rig.sender.follow()
    send.add(pages)
    return send


def said(rig: Rig) -> list[object]:
    return [event for _ in range(4) for event in (*rig.prefill.poll(), *rig.decode.poll())]


@pytest.mark.parametrize("fencing", [False, True])
@pytest.mark.parametrize("told", range(3))
def test_a_layer_lands_before_the_next_is_announced(told: int, fencing: bool) -> None:
    """However many layers the forward announces, the others follow with `complete`, and the record after them."""
    rig = Rig(fencing=fencing)
    send = begin(rig)
    for layer in range(told):
        assert planes_there(rig, 7, 4) == [plane < 2 * layer for plane in range(4)]
        send.stored(layer)
    send.close()
    assert planes_there(rig, 3, 9) == [plane < 2 * told for plane in range(4)]
    assert said(rig) == []
    assert rig.receiver.counters.pages_received == 0
    rig.sender.complete(1, 3)
    rig.sender.finish(1, RECORD)
    events = said(rig)
    assert Delivered(1) in events
    # Arrived means that the checksums of all pages agree.
    assert [type(event) for event in events if isinstance(event, (Arrived, RoomFailed))] == [Arrived]
    assert same_pages(rig.prefill, SRC, rig.decode, DST)
    counters = rig.sender.counters
    assert (counters.pages_written, counters.pages_by_layer) == (3, 3 if told else 0)
    assert counters.bytes_written >= 3 * layout().page_bytes
    assert rig.receiver.counters.gaps == rig.receiver.counters.duplicates == 0


def test_shared_memory_takes_layers() -> None:
    clock, incarnation = Clock(), secrets.token_hex(16)
    prefill = Prefill(clock, ShmSender())
    decode = Decode(clock, ShmReceiver(incarnation), incarnation=incarnation)
    decode.connect(prefill)
    decode.pump()
    decode.receiver.open(1, (prefill.incarnation,), [3, 9], 0)
    prefill.sender.expect(1)
    send = prefill.sender.follow()
    send.add([RoomPages(1, [5, 6], 0)])
    send.stored(0)
    send.close()
    prefill.sender.complete(1, 2)
    prefill.sender.finish(1, RECORD)
    events = [event for _ in range(3) for event in (*prefill.poll(), *decode.poll())]
    assert Delivered(1) in events
    assert any(isinstance(event, Arrived) for event in events)
    assert same_pages(prefill, [5, 6], decode, [3, 9])
    prefill.sender.close()
    decode.receiver.shutdown()


def test_a_forward_begins_before_the_one_before_is_complete() -> None:
    """As on a GPU, launches overlap, and pages are announced in order."""
    rig = Rig()
    rig.begin(1, tuple(DST))
    sends = []
    for first in range(2):
        sends.append(follow(rig, RoomPages(1, SRC[first : first + 1], first)))
        sends[-1].stored(0)
        sends[-1].close()
    rig.sender.complete(1, 1)
    rig.sender.send_pages(1, SRC[2:], 2)
    said(rig)
    assert rig.sender.counters.pages_written == 1, "page 2 is announced behind page 1, which is not complete"
    rig.sender.complete(1, 3)
    rig.sender.finish(1, RECORD)
    assert any(isinstance(event, Arrived) for event in said(rig))
    assert same_pages(rig.prefill, SRC, rig.decode, DST)


def test_rooms_of_one_forward_end_each_on_its_own() -> None:
    """A damaged layer of one room fails only that room, once; the other one arrives."""
    rig = Rig({1: Fault(damage="fail")})  # layer 0 of the second room
    rig.begin(1, (4, 5))
    rig.begin(2, (6,))
    send = follow(rig, RoomPages(1, [1, 2], 0), RoomPages(2, [3], 0))
    for layer in range(2):
        send.stored(layer)
    send.close()
    for room, pages in ((1, 2), (2, 1)):
        rig.sender.complete(room, pages)
    rig.sender.finish(1, RECORD)
    events = said(rig)
    (lost,) = [event for event in events if isinstance(event, TransferLost)]
    assert (lost.room, Delivered(1) in events) == (2, True)
    assert PagesFree(2, (6,)) in events
    assert same_pages(rig.prefill, [1, 2], rig.decode, [4, 5])
    rig.receiver.close(1)
    rig.sender.finish(2, RECORD)  # the node has not read the event yet
    assert rig.sender.active == rig.receiver.active == 0


@pytest.mark.parametrize("fencing", [False, True])
def test_an_abort_between_two_layers(fencing: bool) -> None:
    """The pages are free once what was sent has landed; the rest is never posted, nor a record."""
    rig = Rig({0: Fault(delay=1.0)}, fencing=fencing)
    send = begin(rig)
    send.stored(0)
    rig.receiver.abort(1, "the client went away")
    send.close()
    events = said(rig)
    writes = rig.fabric.writes
    rig.sender.complete(1, 3)
    rig.sender.finish(1, RECORD)
    assert rig.fabric.writes == writes == 1
    assert any(isinstance(event, PagesFree) for event in events) is fencing
    assert rig.sender.draining == 1
    rig.clock.now += 1.5
    events += said(rig)
    assert [event for event in events if isinstance(event, PagesFree)] == [PagesFree(1, tuple(DST))]
    assert rig.sender.counters.delivered == 0
    assert rig.sender.active == rig.sender.draining == 0


def test_a_room_cancelled_with_nothing_sent_yet() -> None:
    rig = Rig()
    send = begin(rig)
    rig.sender.cancel(1, "client_gone", "the client went away")
    send.close()
    assert PagesFree(1, tuple(DST)) in said(rig)
    follow(rig, RoomPages(1, SRC, 0)).close()  # lost a moment ago: this is allowed
    assert rig.sender.active == rig.fabric.writes == 0


def test_a_decode_node_that_dies_between_two_layers_ends_its_rooms() -> None:
    rig = Rig({0: Fault(damage="stick")})
    send = begin(rig)
    send.stored(0)
    send.close()
    rig.sender.peer_lost(rig.decode.incarnation)
    lost = [event for event in rig.prefill.poll() if isinstance(event, TransferLost)]
    assert [event.code for event in lost] == ["node_lost"]
    rig.sender.complete(1, 3)
    assert rig.sender.active == 0


def test_a_long_forward_is_no_stall() -> None:
    """Time counts from `complete`, because nothing can move before it."""
    rig = Rig({2: Fault(damage="stick")})
    send = begin(rig)
    for layer in range(2):
        send.stored(layer)
    send.close()
    rig.clock.now += 5 * LIMITS.stall_timeout
    assert said(rig) == []
    rig.sender.complete(1, 3)
    rig.clock.now += 0.9 * LIMITS.stall_timeout
    assert said(rig) == []
    rig.clock.now += 0.2 * LIMITS.stall_timeout
    rig.prefill.poll()
    assert (rig.sender.counters.stalled, rig.sender.draining) == (1, 1)


def test_misuse_raises_an_error() -> None:
    rig = Rig()
    begin(rig).close()
    with pytest.raises(InternalError, match="finished before its forwards were complete"):
        rig.sender.finish(1, RECORD)
    with pytest.raises(InternalError, match="page 0 sent, 3 is next"):
        follow(rig, RoomPages(1, SRC, 0))
    with pytest.raises(InternalError, match="room 9 is not expected"):
        follow(rig, RoomPages(9, SRC, 0))
    clock = Clock()
    prefill = Prefill(clock, TcpSender(LIMITS))
    with pytest.raises(InternalError, match="TcpSender sends whole pages only"):
        prefill.sender.follow()
    prefill.sender.close()


def test_damage_in_a_layer_is_found_by_the_checksums() -> None:
    rig = Rig({1: Fault(damage="corrupt")})
    send = begin(rig)
    for layer in range(2):
        send.stored(layer)
    send.close()
    rig.sender.complete(1, 3)
    rig.sender.finish(1, RECORD)
    (failed,) = [event for event in said(rig) if isinstance(event, RoomFailed)]
    assert "page 0 of room 1 differs" in failed.reason


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_every_plane_of_every_page_exactly_once(data: st.DataObject) -> None:
    """Any division into chunks, followed or not, from any layer, any number announced, up to two forwards in flight."""
    rig = Rig()
    total = data.draw(st.integers(1, 12), label="pages")
    held = data.draw(st.integers(0, total - 1), label="held")
    src = data.draw(st.permutations(range(1, 16)), label="src")[:total]
    dst = data.draw(st.permutations(range(1, 16)), label="dst")[: total - held]
    landed = Counter[tuple[int, int]]()
    rig.fabric.observers.append(
        lambda _, region, start, length, __: (
            landed.update([(start, length)]) if region is Region.KV and length else None
        )
    )
    rig.receiver.open(1, (rig.prefill.incarnation,), dst, held)
    rig.sender.expect(1)
    rig.prefill.poll()
    done, under_way = held, list[int]()
    while done < total or under_way:
        if done < total and len(under_way) < 2:
            end = data.draw(st.integers(done + 1, total), label="end")
            if data.draw(st.booleans(), label="followed"):
                send, told = rig.sender.follow(), data.draw(st.integers(0, 2), label="told")
                joins = data.draw(st.integers(0, told), label="joins")
                for layer in range(told + 1):
                    if layer == joins:
                        send.add([RoomPages(1, src[done:end], done)])
                    if layer < told:
                        send.stored(layer)
                send.close()
                under_way.append(end)
            else:
                rig.sender.send_pages(1, src[done:end], done)
            done = end
        else:
            rig.sender.complete(1, under_way.pop(0))
            rig.prefill.poll()
    rig.sender.finish(1, HandoffRecord(first_token=7, num_tokens=2 * total))
    assert any(isinstance(event, Arrived) for event in said(rig))
    assert same_pages(rig.prefill, src[held:], rig.decode, dst)
    plan = pair_plan(rig.prefill.layout, rig.decode.layout)
    wanted = copies(plan, runs(range(len(dst)), dst))
    written = Counter[int]()
    for (start, length), times in landed.items():
        written.update(dict.fromkeys(range(start, start + length), times))
    assert written == Counter(byte for copy in wanted for byte in range(copy.dst, copy.dst + copy.length))
    assert rig.sender.counters.pages_written == len(dst)


# -- which transports support layers -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("transport", "endpoint"),
    [("shm", ShmSender), ("cuda_ipc", CudaIpcSender), ("tcp", TcpSender), ("nixl", NixlSender)],
)
def test_config_and_transports_agree(transport: str, endpoint: type) -> None:
    """It is refused by name if the endpoint does not support it."""

    def cluster(layers: bool) -> Cluster:
        made = Cluster(model=Model(path="m"), transfer=Transfer(transport=transport, layers=layers))
        device = "cuda:0" if transport == "cuda_ipc" else "cpu"
        nodes = {
            part: msgspec.structs.replace(
                section, nodes=tuple(msgspec.structs.replace(node, device=device) for node in section.nodes)
            )
            for part, section in (("prefill", made.prefill), ("decode", made.decode))
        }
        security = msgspec.structs.replace(made.security, isolated_network=True)
        return msgspec.structs.replace(made, security=security, **nodes)

    assert not choose_layers(cluster(False))
    if issubclass(endpoint, LayerEndpoint):
        assert choose_layers(cluster(True))
    else:
        with pytest.raises(ConfigError, match=rf"transfer\.layers.*{transport} sends whole pages"):
            choose_layers(cluster(True))
