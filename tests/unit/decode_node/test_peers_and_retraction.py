"""Two parts of the decode node by themselves: connections to prefill nodes, and backups of retracted requests."""

from __future__ import annotations

import errno
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import zmq

from common.engine.forward.rotary_places import ImageAxes
from common.errors import NodeLost, Overloaded, TransferFailed
from common.ipc import RouterSocket
from common.ipc.bad_frames import LIMIT
from common.kv_cache.page_space import PageSpace
from common.kv_cache.radix_cache import NoPrefixCache
from common.messages.generation import ImageSpan, SamplingParams
from common.messages.identity import NodeRef
from common.observability import bounded_log
from common.observability.bounded_log import FIRST, BoundedLog
from common.observability.logs import Log
from decode_node import peers as module
from decode_node.batch_rows import BatchRows
from decode_node.request import DecodeRequest
from decode_node.retraction import Retraction
from kv_transfer.counters import ReceiverCounters
from kv_transfer.inbound import Dial
from tests.fakes.clock import Clock
from tests.fakes.node_cluster import NodeCluster, Shape
from tests.fakes.scenarios import expect_reference, prompt_of
from tests.fakes.waiting import PATIENCE, until

CPU = torch.device("cpu")
SMALL = Shape(page_size=4, decode_pool=96, reserved_tokens=4)


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a link be without a connection for longer than ZMQ's thread may take to make one."""
    monkeypatch.setattr(module, "LINK_SECONDS", PATIENCE)


def ref(number: int, address: str = "") -> NodeRef:
    return NodeRef(
        name=f"p{number}",
        role="prefill",
        incarnation=f"{number:032x}",
        peer_address=address or f"inproc://nobody-{number}",
    )


def test_one_socket_per_incarnation_and_lost_ones_are_closed_when_nobody_needs_them() -> None:
    with NodeCluster(SMALL) as cluster:
        peers = cluster.decode.peers
        for _ in range(3):
            peers.ensure(ref(7))
        peers.ensure(ref(8))
        assert peers.connected == {ref(7).incarnation, ref(8).incarnation}
        peers.close_unused(set())
        assert len(peers.connected) == 2, "nobody is lost"
        peers.lost(ref(7).incarnation)
        peers.lost("f" * 32)
        peers.close_unused({ref(7).incarnation})
        assert len(peers.connected) == 2, "an abort still has to be acknowledged over this socket"
        peers.ensure(ref(7))
        peers.close_unused(set())
        assert len(peers.connected) == 2, "it said Hello again, so it is no longer lost"
        peers.lost(ref(7).incarnation)
        peers.close_unused(set())
        assert peers.connected == {ref(8).incarnation}


def test_a_restarted_prefill_node_is_heard_while_its_earlier_incarnation_is_connected(tmp_path: Path) -> None:
    """The socket to the earlier incarnation reconnects to the same address: it must not take the route."""
    address = f"ipc://{tmp_path}/peer.sock"
    context = zmq.Context[zmq.Socket[bytes]]()
    receiver = FakeReceiver()
    connections = module.PeerConnections(context, "decode-0", "d" * 32, receiver, zmq.Poller())  # type: ignore[arg-type]
    try:
        first = RouterSocket(context, address)
        connections.ensure(ref(1, address))
        until(first.drain)
        first.close()  # its process dies; a request of it still runs, so its socket stays
        second = RouterSocket(context, address)
        connections.ensure(ref(2, address))
        routes: set[bytes] = set()

        def heard_from_both() -> bool:
            receiver.say(ref(1).incarnation)
            connections.pump()
            routes.update(route for route, _ in second.drain())
            return len(routes) == 2

        until(heard_from_both)
        [route] = [each for each in routes if ref(2).incarnation.encode() in each]
        assert second.send(route, b"for the new one")

        def answered() -> bool:
            connections.pump()
            return (ref(2).incarnation, b"for the new one") in receiver.handled

        until(answered)
        assert ref(1).incarnation not in dict(receiver.handled)
        second.close()
    finally:
        connections.close()
        context.term()


def test_a_broken_link_gives_its_requests_up_and_is_not_used_until_it_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The router still counts the prefill node as up: its requests are placed on another pair of nodes."""
    address = f"ipc://{tmp_path}/peer.sock"
    context = zmq.Context[zmq.Socket[bytes]]()
    receiver = FakeReceiver()
    connections = module.PeerConnections(context, "decode-0", "d" * 32, receiver, zmq.Poller())  # type: ignore[arg-type]
    try:
        there = RouterSocket(context, address)
        connections.ensure(ref(1, address))
        until(lambda: connections.pump() or there.drain())
        assert receiver.links_lost == []
        # Not before: the first connection may take longer.
        monkeypatch.setattr(module, "LINK_SECONDS", 0.05)
        there.close()
        until(lambda: connections.pump() or receiver.links_lost)
        assert receiver.links_lost == [ref(1).incarnation]
        with pytest.raises(TransferFailed, match="cannot be reached from this decode node"):
            connections.ensure(ref(1, address))
        connections.close_unused(set())
        assert len(connections.connected) == 1, "the socket tells when the link works again"
        there = RouterSocket(context, address)

        def works() -> bool:
            connections.pump()
            with suppress(TransferFailed):
                connections.ensure(ref(1, address))
                return True
            return False

        until(works)
        until(lambda: connections.pump() or there.drain())
        there.close()
    finally:
        connections.close()
        context.term()


def test_a_prefill_node_that_sends_garbage_is_cut_off_and_others_are_heard(tmp_path: Path) -> None:
    context = zmq.Context[zmq.Socket[bytes]]()
    receiver = FakeReceiver()
    poller = zmq.Poller()
    connections = module.PeerConnections(context, "decode-0", "d" * 32, receiver, poller)  # type: ignore[arg-type]
    liar, honest = (RouterSocket(context, f"ipc://{tmp_path}/{name}.sock") for name in ("liar", "honest"))
    try:
        routes = {}
        for number, there in ((1, liar), (2, honest)):
            connections.ensure(ref(number, there.address))
            routes[number] = until(lambda: connections.pump() or there.drain())[0][0]  # noqa: B023
        for _ in range(LIMIT):
            assert liar.send(routes[1], b"garbage")
        until(lambda: connections.pump() or receiver.links_lost)
        assert receiver.links_lost == [ref(1).incarnation]
        assert connections.connected == {ref(2).incarnation}
        assert len(poller.sockets) == 1
        assert receiver.sends[ref(1).incarnation](b"an abort that is repeated") is False
        with pytest.raises(TransferFailed, match="prefill node p1 sent too many invalid frames"):
            connections.ensure(ref(1, liar.address))
        assert honest.send(routes[2], b"fine")
        until(lambda: connections.pump() or (ref(2).incarnation, b"fine") in receiver.handled)
    finally:
        connections.close()
        liar.close()
        honest.close()
        context.term()


class WarningLines(Log):
    """Keeps the event of each warning and, of summaries, how many lines it stands for."""

    def __init__(self) -> None:
        super().__init__("test")
        self.kept: list[tuple[str, object]] = []

    def warning(self, event: str, **fields: object) -> None:
        self.kept.append((event, fields.get("count")))


def test_the_end_of_a_flood_of_bad_frames_is_logged_although_nothing_follows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, log = Clock(), WarningLines()
    monkeypatch.setattr(module, "Log", lambda component: log)
    monkeypatch.setattr(module, "BoundedLog", partial(BoundedLog, clock=clock))
    context = zmq.Context[zmq.Socket[bytes]]()
    receiver = FakeReceiver()
    connections = module.PeerConnections(context, "decode-0", "d" * 32, receiver, zmq.Poller())  # type: ignore[arg-type]
    liar = RouterSocket(context, f"ipc://{tmp_path}/liar.sock")
    try:
        connections.ensure(ref(1, liar.address))
        route = until(lambda: connections.pump() or liar.drain())[0][0]
        for _ in range(FIRST + 3):
            assert liar.send(route, b"garbage")
        until(lambda: connections.pump() or receiver.counters.malformed == FIRST + 3)
        assert log.kept == [("refused a frame", None)] * FIRST
        clock.now += bounded_log.WINDOW
        connections.pump()
        assert log.kept[FIRST:] == [("refused a frame: not logged individually", 3)]
    finally:
        connections.close()
        liar.close()
        context.term()


def test_a_connected_process_whose_loop_is_busy_is_known_to_live(tmp_path: Path) -> None:
    """Its main loop reads nothing, but ZMQ's thread accepts connections, which only a running process can do."""
    context = zmq.Context[zmq.Socket[bytes]]()
    receiver = FakeReceiver()
    connections = module.PeerConnections(context, "decode-0", "d" * 32, receiver, zmq.Poller())  # type: ignore[arg-type]
    busy = RouterSocket(context, f"ipc://{tmp_path}/busy.sock")
    try:
        connections.ensure(ref(1, busy.address))
        connections.ensure(ref(2, f"ipc://{tmp_path}/nobody.sock"))
        until(lambda: connections.pump() or receiver.links_that_work)
        assert receiver.links_that_work == {ref(1).incarnation}
    finally:
        connections.close()
        busy.close()
        context.term()


def test_a_node_without_free_descriptors_refuses_the_request_and_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def exhausted(*arguments: object, **named: object) -> object:
        raise zmq.ZMQError(errno.EMFILE)

    with NodeCluster(SMALL) as cluster:
        first = cluster.submit(prompt_of(10), 4)
        cluster.run(lambda: len(first.output) > 1)
        with monkeypatch.context() as patch:
            patch.setattr(module, "Dealer", exhausted)
            with pytest.raises(TransferFailed, match="p7 .* Too many open files"):
                cluster.decode.peers.ensure(ref(7))
        cluster.decode.peers.ensure(ref(7))
        cluster.run()
        expect_reference(first)


class FakeReceiver:
    """The interface of Receiver that PeerConnections uses."""

    def __init__(self) -> None:
        self.sends: dict[str, Callable[[bytes], object]] = {}
        self.handled: list[tuple[str, bytes]] = []
        self.links_lost: list[str] = []
        self.links_that_work: set[str] = set()
        self.counters = ReceiverCounters()

    def link_works(self, incarnation: str) -> None:
        self.links_that_work.add(incarnation)

    def link_lost(self, incarnation: str) -> None:
        self.links_lost.append(incarnation)

    def connect(self, incarnation: str, send: Callable[[bytes], object], dial: Dial) -> None:
        del dial
        self.sends[incarnation] = send
        self.say(incarnation)

    def say(self, incarnation: str) -> None:
        self.sends[incarnation](b"from the decode node")

    def handle(self, incarnation: str, frame: bytes) -> None:
        self.handled.append((incarnation, frame))
        self.counters.malformed += frame == b"garbage"

    def peer_lost(self, incarnation: str) -> None:
        pass


def test_a_prefill_node_that_had_lost_this_node_is_greeted_again() -> None:
    """A router has reported this node as lost, which was only stopped, and goes on before it hears of that."""
    with NodeCluster(SMALL) as cluster:
        first = cluster.submit(prompt_of(10, 0), 4)
        cluster.run(lambda: first.over)
        cluster.prefill.node.peer_lost(cluster.decode.node.life.incarnation)
        calls = [cluster.submit(prompt_of(10 + n, n), 4) for n in range(3)]
        cluster.run(lambda: all(call.over for call in calls))
        expect_reference(first, *calls)
        codes = [failed.code for failed in cluster.failures]
        assert 1 <= codes.count(NodeLost.code) <= len(calls)
        assert TransferFailed.code not in codes
        assert cluster.decode.receiver.counters.refused == 0
        cluster.settle()


def test_peers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_PEERS", 3)
    with NodeCluster(SMALL) as cluster:
        peers = cluster.decode.peers
        for number in range(3):
            peers.ensure(ref(100 + number))
        with pytest.raises(Overloaded, match="already connected to 3 prefill nodes"):
            peers.ensure(ref(200))
        peers.lost(ref(100).incarnation)
        peers.close_unused(set())
        peers.ensure(ref(200))


def test_an_address_that_is_none_may_be_tried_elsewhere() -> None:
    with NodeCluster(SMALL) as cluster:
        with pytest.raises(TransferFailed, match="prefill node p7 cannot be connected to"):
            cluster.decode.peers.ensure(ref(7, "carrier-pigeon://roof"))
        assert not cluster.decode.peers.connected


def test_backups_stay_within_their_memory() -> None:
    """There is room for one backup of two: one request returns from it, another is preempted and placed again."""
    page = 4 * 2 * 2 * 2 * 8 * 4  # tokens, key and value, layers, heads, width, bytes
    shape = replace(SMALL, backup_bytes=8 * page)
    with NodeCluster(shape) as cluster:
        calls = [cluster.submit(prompt_of(10 + n, n), 40) for n in range(5)]
        most = 0
        while not all(call.over for call in calls):
            cluster.turn()
            used = cluster.decode.retraction.used_bytes
            held = [r.backup for r in cluster.decode.node.queues.retracted if r.backup]
            assert used == sum(backup.nbytes for backup in held) <= shape.backup_bytes
            assert cluster.decode.backups.nbytes == used  # every turn's plan has been executed
            most = max(most, used)
            assert cluster.turns < 2000
        expect_reference(*calls)
        assert most > 0
        assert "preempted" in {failed.code for failed in cluster.failures}
        assert cluster.decode.link.counters.retractions > len(cluster.failures)
        cluster.settle()


def test_a_row_has_the_rotary_delta_of_its_images_after_hand_over_and_resume() -> None:
    """Row C3: images make rotary positions differ from sequence indices; only the relay row has the difference."""
    space, rows = PageSpace(4, 9, NoPrefixCache()), BatchRows(2)
    retraction = Retraction(space, rows, ImageAxes(), 9, lambda pages: pages)
    request = DecodeRequest(
        room=1,
        request_id="r",
        prompt=[3] * 10,
        emitted=0,
        sampling=SamplingParams(max_tokens=9, seed=1),
        prefill=ref(7),
        received=0.0,
        deadline=9.0,
        images=(ImageSpan(2, 6, bytes(32), rows=2),),  # six tokens, three columns
        output=[5],
        launched=1,
    )
    request.lease = space.lease(space.keys(request.contents), 3, max_cached_tokens=0)
    retraction.occupy(request)
    (joined,) = rows.take_moves().joins
    assert (joined.row, joined.rope_delta) == (request.row, -3)
    assert retraction.save(request)
    retraction.planned(1)
    assert space.free_pages == 5, "a plan that is not read yet may still copy them"
    retraction.settle(())
    assert space.free_pages == 5
    retraction.read(1)
    retraction.settle({1})
    assert (space.free_pages, rows.free) == (5, 1), "its copy has not ended"
    assert not retraction.restore(request)
    retraction.settle(())
    assert (space.free_pages, rows.free) == (8, 2)
    assert retraction.restore(request)
    (joined,) = rows.take_moves().joins
    assert (joined.row, joined.rope_delta) == (request.row, -3)
