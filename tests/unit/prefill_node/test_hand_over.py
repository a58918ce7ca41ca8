"""The end of the prefill leg is reported when it happens, not when the node next wakes up."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest

from common.messages.router_inbox import FirstToken, PrefillDone
from kv_transfer.busy_rooms import LONGEST, SHORTEST
from prefill_node.absent_peers import ABSENT_SECONDS, LOOK_SECONDS
from prefill_node.node import WATCH_INTERVAL
from tests.fakes.loopback import Fault
from tests.fakes.node_cluster import NodeCluster, Shape, Watched
from tests.fakes.scenarios import prompt_of
from tests.fakes.tiny_model import reference
from tests.fakes.waiting import until


def test_slots_that_arrive_after_the_prompt_are_used_at_once() -> None:
    """Granted, written and delivered follow each other in one turn: nothing waits for the idle poll."""
    with NodeCluster(Shape()) as cluster:
        call = cluster.submit(prompt_of(20, 3), 5, legs="p")
        said: list[object] = []
        for _ in range(5):
            cluster.prefill.node.loop.turn()
            said += cluster.prefill.link.taken()
        assert [type(each) for each in said] == [FirstToken], (
            "the prompt is computed, there is no decode node yet"
        )
        cluster.send_leg(call, "d")
        for _ in range(3):  # sends Hello and slots
            cluster.decode.node.loop.turn()
            cluster.prefill.node.loop.turn()
            said = list(cluster.prefill.link.taken())
            if said:
                break
            assert not cluster.prefill.node.queues.handing_over or not _granted(cluster)
        assert [type(each) for each in said] == [PrefillDone]
        cluster.abort(call)
        cluster.settle()


def test_transfers_continue_while_forwards_run() -> None:
    """On both nodes pages arrive, are checked and announced during another forward; nothing is held afterwards."""
    shape = Shape(completion=Watched, chunk_tokens=8, max_running=4)
    with NodeCluster(shape) as cluster:
        calls = [cluster.submit(prompt_of(5 + 7 * n, n), 12) for n in range(9)]
        cluster.run()
        for call in calls:
            assert (call.ids, call.finish) == reference(tuple(call.prompt), call.sampling)
        cluster.settle()


def _granted(cluster: NodeCluster) -> bool:
    """Whether the node received slots in an earlier turn."""
    return any(request.granted for request in cluster.prefill.node.queues)


def test_an_idle_node_looks_often_whether_a_write_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """The record follows the last page, and the decode node waits for it."""
    with NodeCluster(Shape()) as cluster:
        cluster.fabric.plan = lambda n: Fault(delay=5.0)
        call = cluster.submit(prompt_of(30), 4)
        cluster.run(until=lambda: call.ids != [] and cluster.prefill.sender.poll_interval is not None)
        slept: list[float] = []
        monkeypatch.setattr("prefill_node.node.time.sleep", slept.append)
        cluster.turn_one(cluster.prefill)
        assert slept == [WATCH_INTERVAL]
        cluster.fabric.plan = lambda n: Fault()
        cluster.clock.now += 6.0
        cluster.run()
        cluster.settle()


def test_a_write_that_does_not_end_is_polled_seldom_and_messages_are_still_seen_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with NodeCluster(Shape()) as cluster:
        cluster.fabric.plan = lambda n: Fault(delay=5.0)
        call = cluster.submit(prompt_of(30), 4)
        cluster.run(until=lambda: call.ids != [] and cluster.prefill.sender.poll_interval is not None)
        slept: list[float] = []
        monkeypatch.setattr("prefill_node.node.time.sleep", slept.append)
        intervals: list[float | None] = []
        for waited in (0.004, 0.004, 0.2, 0.8):
            cluster.clock.now += waited
            intervals.append(cluster.prefill.sender.poll_interval)
            cluster.turn_one(cluster.prefill)
        assert intervals == pytest.approx([SHORTEST, SHORTEST, 0.0021, LONGEST])
        assert slept == [SHORTEST, SHORTEST]  # the other turns waited for a message
        cluster.fabric.plan = lambda n: Fault()
        cluster.clock.now += 6.0
        cluster.run()
        cluster.settle()


def test_a_decode_node_that_ended_while_no_router_knew_it_is_forgotten() -> None:
    """Its memory would stay mapped, and a new one might find no room for its own."""
    with NodeCluster(Shape(decodes=2)) as cluster:
        calls = [cluster.submit(prompt_of(20, n), 3, decode=n) for n in range(2)]
        cluster.run()
        gone, other = cluster.decodes
        assert {peer.incarnation for peer in cluster.prefill.sender.peers.all()} == {
            gone.ref.incarnation,
            other.ref.incarnation,
        }
        identity = next(
            peer.identity
            for peer in cluster.prefill.sender.peers.all()
            if peer.incarnation == gone.ref.incarnation
        )
        attached = len(cluster.fabric.attached)
        cluster.kill(gone)
        gone.peers.close()
        # A thread of ZMQ notices the end of the connection a moment later.
        until(lambda: not cluster.prefill.peers.reachable(identity))
        cluster.clock.now += LOOK_SECONDS
        cluster.turn_one(cluster.prefill)
        for _ in range(int(ABSENT_SECONDS / LOOK_SECONDS)):
            assert len(cluster.fabric.attached) == attached
            cluster.clock.now += LOOK_SECONDS
            cluster.turn_one(cluster.prefill)
        assert [peer.incarnation for peer in cluster.prefill.sender.peers.all()] == [other.ref.incarnation]
        assert len(cluster.fabric.attached) == attached - 1
        assert all(call.finish for call in calls)


def test_both_nodes_announce_long_work_to_routers_and_to_each_other() -> None:
    with NodeCluster() as cluster:
        prefill, decode = cluster.prefill, cluster.decode
        for side, heartbeats in ((prefill, prefill.sender.heartbeats), (decode, decode.receiver.heartbeats)):
            side.node.announce(30.0)
            assert side.link.announced == [30.0]
            assert heartbeats.busy_ms == 30_000


def test_prompts_are_taken_while_a_forward_runs() -> None:
    """The time since which a prompt waits begins with its message, not with the end of a forward."""
    with NodeCluster(Shape(completion=Watched)) as cluster:
        waiting: list[int] = []
        node = cluster.prefill.node
        wait = Watched.wait

        def waited(self: Watched, meanwhile: Callable[[], None] | None = None) -> None:
            cluster.send_leg(late, "p")
            wait(self, meanwhile)
            waiting.append(len(node.queues.waiting))

        first, late = cluster.submit(prompt_of(22)), cluster.submit(prompt_of(9), legs="d")
        cluster.turn_one(cluster.prefill)
        with mock.patch.object(Watched, "wait", waited):
            cluster.turn_one(cluster.prefill)
        assert waiting == [1]
        cluster.run()
        for call in (first, late):
            assert (call.ids, call.finish) == reference(tuple(call.prompt), call.sampling)
        cluster.settle()
