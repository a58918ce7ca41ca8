"""A node's link to a router scripted by the test, over a real socket. The test also controls the link's clock."""

from __future__ import annotations

import errno
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest
import zmq

from common.ipc import Dealer, RouterSocket
from common.messages import prefill_inbox, router_inbox
from common.messages.generation import SamplingParams
from common.messages.identity import NodeCounters, NodeLoad, NodeRef
from common.messages.node_inbox import Abort, HeartbeatAck, PeerLost, Registered, Rejected
from common.messages.prefill_inbox import Prefill
from common.messages.protocol import CONTROL_PROTOCOL_VERSION
from common.messages.router_inbox import Failed, Goodbye, Heartbeat, Register
from common.messages.wire import encode
from common.node.router_link import REGISTER_INTERVAL, RouterLink, control_first
from common.node.router_links import RouterLinks
from common.node_plan import RouterPlan
from common.observability.logs import Log
from tests.fakes.clock import Clock
from tests.fakes.waiting import until

S = TypeVar("S")
NODE = "n" * 32
MAIN = f"prefill-0/{NODE}".encode()
BEAT = MAIN + b"/beat"
INTERVAL = 0.01  # real seconds between heartbeats
TIMEOUT = 2.0  # seconds of the test's clock
LATER = CONTROL_PROTOCOL_VERSION + 1


def prefill(room: int) -> Prefill:
    return Prefill(
        room=room,
        request_id="q",
        token_ids=[1],
        emitted=0,
        sampling=SamplingParams(max_tokens=1),
        decode="d",
        deadline_ms=1000,
    )


def registered(router: str) -> Registered:
    return Registered(router_incarnation=router, protocol_version=CONTROL_PROTOCOL_VERSION)


class Rig:
    """A link and a router that the test scripts."""

    def __init__(self, directory: Path, opened: bool = True) -> None:
        self.clock = Clock()
        self.address = f"ipc://{directory}/router.sock"
        self.node_context, self.router_context = (zmq.Context[zmq.Socket[bytes]]() for _ in range(2))
        self.router = self.listener() if opened else None
        self.link: RouterLink[Any] = RouterLink(
            self.node_context,
            RouterPlan(addresses=(self.address,), heartbeat_interval=INTERVAL, timeout=TIMEOUT),
            self.address,
            Register(
                protocol_version=CONTROL_PROTOCOL_VERSION,
                node=NodeRef(name="prefill-0", role="prefill", incarnation=NODE),
                host="h",
                pid=1,
                model_fingerprint="f",
                max_model_len=10,
                page_size=16,
                total_pages=4,
                effective_config={},
            ),
            prefill_inbox.codec,
            Log("test"),
            clock=self.clock,
        )
        self.links = RouterLinks([self.link], self.clock)
        self.heard: list[tuple[bytes, router_inbox.RouterMessage]] = []
        self.incarnation = "router-a"
        self.echoing = False
        self.known = True

    def listener(self) -> RouterSocket:
        return RouterSocket(self.router_context, self.address)

    def replace_router(self) -> None:
        """Open another socket at the address, which knows nothing of what this one has sent and received."""
        assert self.router is not None
        self.router.close()
        self.router_context.term()  # until then its thread may still remove the socket's file
        self.router_context = zmq.Context[zmq.Socket[bytes]]()
        self.router = self.listener()

    def close(self) -> None:
        self.link.close()
        # `close` does not wait for long, and `destroy` would close the socket of a thread that still runs.
        until(lambda: all(each.name != "heartbeat" for each in threading.enumerate()))
        if self.router is not None:
            self.router.close()
        self.node_context.destroy(linger=0)
        self.router_context.destroy(linger=0)

    def listen(self) -> list[tuple[bytes, router_inbox.RouterMessage]]:
        """Receive the messages of nodes; answer heartbeats if asked to."""
        assert self.router is not None
        for peer, frame in self.router.drain():
            message = router_inbox.codec.decode(frame)
            self.heard.append((peer, message))
            if isinstance(message, Heartbeat) and self.echoing:
                self.echo(message.sequence)
        return self.heard

    def echo(self, sequence: int) -> bool:
        """Answer a heartbeat. False if the connection on which it came has ended: further heartbeats will come."""
        ack = HeartbeatAck(router_incarnation=self.incarnation, sequence=sequence, known=self.known)
        assert self.router is not None
        return self.router.datagram(BEAT, encode(ack))

    def say(self, message: msgspec.Struct) -> None:
        assert self.router is not None
        assert self.router.send(MAIN, encode(message))

    def said(self, kind: type[S]) -> list[S]:
        return [message for _, message in self.listen() if isinstance(message, kind)]

    def receive(self, count: int = 1) -> list[Any]:
        """Return what the link passes to the main loop once `count` messages have arrived."""
        got: list[Any] = []
        until(lambda: (got.extend(self.link.drain()), len(got) >= count)[1])
        return got

    def register(self) -> None:
        """Wait until the node registers, and let the router answer."""
        before = len(self.said(Register))
        until(lambda: self.link.drain() or len(self.said(Register)) > before)
        self.say(registered(self.incarnation))
        self.receive()
        assert self.link.registered

    def beat(self) -> Heartbeat:
        """Return a heartbeat that is sent after this call."""
        made = self.link.heartbeats
        return until(lambda: [beat for beat in self.said(Heartbeat) if beat.sequence > made])[-1]


def test_a_node_that_cannot_send_heartbeats_does_not_start(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise it would register for ever with a router that hears nothing of it."""

    def exhausted(self: zmq.Socket[bytes], *arguments: object) -> object:
        raise zmq.ZMQError(errno.EMFILE)

    monkeypatch.setattr(zmq.Socket, "get_monitor_socket", exhausted)
    with pytest.raises(zmq.ZMQError, match="Too many open files"):
        rig.link.start()


def test_a_node_without_a_thread_for_heartbeats_does_not_start_and_closes_everything(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            rig.link.start()
    rig.link.close()
    ended = threading.Thread(target=rig.node_context.term, daemon=True)
    ended.start()
    until(lambda: not ended.is_alive())


@pytest.fixture
def rig() -> Iterator[Rig]:
    with tempfile.TemporaryDirectory(prefix="td") as directory:
        made = Rig(Path(directory))
        yield made
        made.close()


# -- registration ----------------------------------------------------------------------------------------------


def test_registrations_do_not_pile_up_while_there_is_no_router() -> None:
    """A node keeps what a peer has not acknowledged, and a router of the file may be absent for days."""
    with tempfile.TemporaryDirectory(prefix="td") as directory, closing(Rig(Path(directory), False)) as rig:
        for _ in range(50):
            rig.link.drain()
            rig.clock.now += REGISTER_INTERVAL
        rig.router = rig.listener()
        rig.register()
        assert len(rig.said(Register)) <= 2


def test_registration_is_repeated_until_it_is_answered(rig: Rig) -> None:
    for count in range(1, 4):
        rig.link.drain()
        rig.link.drain()  # immediately again: nothing more is sent
        until(lambda: len(rig.said(Register)) == count)  # noqa: B023
        rig.clock.now += REGISTER_INTERVAL
    assert not rig.link.registered
    rig.say(registered("router-a"))
    assert rig.receive() == [registered("router-a")]
    assert rig.link.registered
    rig.link.send(Goodbye(incarnation=NODE))
    until(lambda: rig.said(Goodbye))  # after everything that was sent before
    said = len(rig.said(Register))
    rig.clock.now += 10 * REGISTER_INTERVAL
    rig.link.drain()
    rig.link.send(Goodbye(incarnation=NODE))
    until(lambda: len(rig.said(Goodbye)) == 2)
    assert len(rig.said(Register)) == said


def test_a_rejection_reaches_the_node(rig: Rig) -> None:
    rig.link.drain()
    until(lambda: rig.said(Register))
    rig.say(Rejected(reason="another model"))
    assert rig.receive() == [Rejected(reason="another model")]
    assert not rig.link.registered


@pytest.mark.parametrize(
    ("frame", "version"),
    [
        (Registered(router_incarnation="router-a", protocol_version=LATER), f"version {LATER}"),
        ({"type": "Registered", "router_incarnation": "router-a"}, "a version from before version 1"),
        ({"type": "Registered", "protocol_version": LATER, "router": "in another form"}, f"version {LATER}"),
    ],
)
def test_a_router_of_another_version_is_refused_with_a_sentence(
    rig: Rig, frame: object, version: str
) -> None:
    """The node stops as if the router had refused it, and its log says why."""
    rig.link.drain()
    until(lambda: rig.said(Register))
    assert rig.router is not None
    assert rig.router.send(MAIN, msgspec.msgpack.encode(frame))
    (message,) = rig.receive()
    assert isinstance(message, Rejected)
    assert message.reason == (
        f"the router speaks {version} of the control protocol, this process speaks version {CONTROL_PROTOCOL_VERSION}: "
        "run the same version of tandem on the router and every node"
    )
    assert not rig.link.registered
    assert rig.link.refused_messages == 0


def test_a_malformed_answer_of_a_router_of_this_version_is_counted(rig: Rig) -> None:
    rig.link.drain()
    until(lambda: rig.said(Register))
    assert rig.router is not None
    frame = {"type": "Registered", "protocol_version": CONTROL_PROTOCOL_VERSION}
    assert rig.router.send(MAIN, msgspec.msgpack.encode(frame))
    until(lambda: rig.link.drain() or rig.link.refused_messages == 1)
    assert not rig.link.registered


def test_a_node_speaks_under_its_incarnation(rig: Rig) -> None:
    rig.link.drain()
    rig.link.start()
    until(lambda: rig.said(Heartbeat))
    until(lambda: rig.said(Register))
    assert {(peer, type(message)) for peer, message in rig.heard} == {
        (MAIN, Register),
        (BEAT, Heartbeat),
    }


def test_an_unregistered_node_has_no_router_to_lose(rig: Rig) -> None:
    rig.clock.now += 1e6
    assert not rig.link.lost()


# -- fencing ---------------------------------------------------------------------------------------------------


def test_silence_is_lost_once_and_then_registers_again(rig: Rig) -> None:
    rig.register()
    rig.clock.now += TIMEOUT
    assert not rig.link.lost()
    rig.clock.now += 0.001
    assert rig.link.lost()
    assert not rig.link.lost()
    assert not rig.link.registered
    rig.register()  # without waiting for the interval
    assert not rig.link.lost()


def test_work_that_a_router_has_forgotten_is_dropped_although_it_was_read_late(rig: Rig) -> None:
    """A node that was stopped may notice the loss before it reads what waits in its socket."""
    rig.register()
    rig.say(prefill(1))
    until(lambda: rig.link.readable)
    rig.clock.now += TIMEOUT + 0.001
    assert rig.link.lost()
    assert [message.room for message in rig.receive()] == [1]
    assert not rig.link.lost()
    rig.replace_router()
    until(lambda: (rig.link.drain(), rig.listen(), rig.link.lost())[2])
    assert not rig.link.lost()
    rig.clock.now += REGISTER_INTERVAL
    rig.register()
    assert not rig.link.lost()


def test_a_router_that_was_replaced_after_its_loss_was_noticed_is_not_lost_again(rig: Rig) -> None:
    """Work that the node has taken from elsewhere in between would be dropped with it."""
    rig.register()
    rig.clock.now += TIMEOUT + 0.001
    assert rig.link.lost()
    rig.replace_router()
    asked = len(rig.said(Register))
    until(lambda: rig.link.drain() or len(rig.said(Register)) > asked)
    assert not rig.link.lost()
    rig.clock.now += REGISTER_INTERVAL
    rig.register()
    assert not rig.link.lost()


def test_work_of_a_router_that_only_stalled_is_kept_before_it_answers_the_registration(rig: Rig) -> None:
    rig.register()
    rig.clock.now += TIMEOUT + 0.001
    assert rig.link.lost()
    rig.say(prefill(1))
    assert [message.room for message in rig.receive()] == [1]
    rig.clock.now += REGISTER_INTERVAL
    rig.register()
    assert not rig.link.lost()


def test_echoes_keep_the_link(rig: Rig) -> None:
    rig.register()
    rig.echoing = True
    rig.link.start()
    for _ in range(4):
        rig.clock.now += TIMEOUT * 0.75
        until(
            lambda: (rig.listen(), rig.link.last_echo is not None and rig.link.last_echo[1] == rig.clock.now)[
                1
            ]
        )
        assert not rig.link.lost()


def test_heartbeats_that_nobody_echoes_do_not_keep_it(rig: Rig) -> None:
    rig.register()
    rig.link.start()
    rig.beat()
    rig.clock.now += TIMEOUT + 0.001
    rig.beat()
    assert rig.link.lost()


def test_a_new_router_on_the_same_address(rig: Rig) -> None:
    """After a kill and restart, the node drops the old router's requests and registers with the new one."""
    rig.register()
    rig.echoing = True
    rig.link.start()
    rig.beat()
    rig.replace_router()
    rig.incarnation, rig.known = "router-b", False
    until(lambda: (rig.listen(), rig.link.lost())[1])
    assert not rig.link.registered
    rig.known = True
    rig.register()
    beat = rig.beat()
    until(lambda: (rig.listen(), rig.link.last_echo is not None and rig.link.last_echo[0] == "router-b")[1])
    assert beat.incarnation == NODE
    assert not rig.link.lost()


def test_a_node_that_the_router_gave_up_is_lost(rig: Rig) -> None:
    rig.register()
    rig.link.start()
    rig.beat()
    rig.known = False
    assert rig.echo(rig.beat().sequence)
    until(rig.link.lost)
    assert not rig.link.lost()
    rig.known, rig.echoing = True, True
    rig.register()
    assert not rig.link.lost()


def test_an_old_answer_says_nothing_about_a_new_registration(rig: Rig) -> None:
    """Heartbeats sent before the registration arrived are answered `known: false` after it."""
    rig.link.start()
    early = rig.beat()
    rig.register()
    rig.known = False
    # The registration counts as an echo at the time before.
    rig.clock.now += 0.001
    assert rig.echo(early.sequence)
    until(lambda: rig.link.last_echo is not None and rig.link.last_echo[1] == rig.clock.now)
    rig.known, rig.echoing = True, True
    rig.beat()
    rig.beat()
    assert not rig.link.lost()


def test_a_probe_on_the_main_socket_is_no_echo(rig: Rig) -> None:
    """The router's probe tests whether the socket is alive; it proves only one direction."""
    rig.register()
    rig.clock.now += TIMEOUT + 1
    rig.say(HeartbeatAck(router_incarnation="router-a", sequence=0, known=True))
    rig.receive()
    assert rig.link.lost()


# -- heartbeats ------------------------------------------------------------------------------------------------


def test_heartbeats_continue_while_the_main_loop_is_blocked(rig: Rig) -> None:
    """This thread is the main loop and does nothing for the link: heartbeats carry the age of its last turn."""
    load = NodeLoad(queued=3, total_pages=9)
    before = time.time()
    rig.links.publish("up", load, NodeCounters(steps=7))
    rig.link.start()
    first = rig.beat()
    assert before <= first.as_of <= time.time()
    assert (first.state, first.load, first.counters.steps, first.loop_age_ms) == ("up", load, 7, 0)
    rig.clock.now += 5.0
    later = rig.beat()
    assert later.loop_age_ms == 5000
    assert later.as_of == first.as_of
    assert later.sequence > first.sequence
    rig.links.publish("draining", load, NodeCounters())
    turned = rig.beat()
    assert (turned.state, turned.loop_age_ms) == ("draining", 0)


def test_announced_work_travels_until_the_loop_turns(rig: Rig) -> None:
    """The announced time counts from the loop's last turn; a shorter announcement revokes nothing."""
    rig.links.publish("up", NodeLoad(), NodeCounters())
    rig.link.start()
    assert rig.beat().announced_ms == 0
    rig.clock.now += 1.0
    rig.links.announce(20.0)
    rig.links.announce(4.0)
    rig.clock.now += 7.0
    busy = rig.beat()
    assert (busy.loop_age_ms, busy.announced_ms) == (8_000, 21_000)
    rig.links.publish("up", NodeLoad(), NodeCounters())
    assert rig.beat().announced_ms == 0


def test_before_the_first_turn_a_node_is_loading(rig: Rig) -> None:
    rig.link.start()
    assert rig.beat().state == "loading"


def test_noise_on_the_heartbeat_socket_is_ignored(rig: Rig) -> None:
    rig.link.start()
    rig.beat()
    assert rig.router is not None
    assert rig.router.datagram(BEAT, b"\xc1")
    assert rig.router.datagram(BEAT, encode(PeerLost(incarnation="p")))
    rig.beat()
    rig.beat()
    assert rig.link.refused_messages == 0


def test_closing_ends_the_thread_and_frees_the_context(rig: Rig) -> None:
    rig.link.start()
    rig.beat()
    rig.link.send(Goodbye(incarnation=NODE))
    rig.link.close()
    rig.node_context.term()
    until(lambda: rig.said(Goodbye))
    until(lambda: all(each.name != "heartbeat" for each in threading.enumerate()))


def test_closing_a_link_that_was_never_started(rig: Rig) -> None:
    rig.link.close()
    rig.node_context.term()


# -- messages --------------------------------------------------------------------------------------------------


def test_control_comes_before_work(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.register()
    sent = [
        prefill(1),
        prefill(2),
        Abort(room=9, reason="gone"),
        prefill(3),
        PeerLost(incarnation="p"),
    ]
    for message in sent:
        rig.say(message)
    frames: list[bytes] = []
    drain = Dealer.drain

    def all_at_once(dealer: Dealer) -> list[bytes]:
        frames.extend(drain(dealer))
        return frames if len(frames) == len(sent) else []

    monkeypatch.setattr(Dealer, "drain", all_at_once)
    got: list[Any] = until(rig.link.drain)
    assert [type(message) for message in got[:2]] == [Abort, PeerLost]
    assert [message.room for message in got[2:]] == [1, 2, 3]


def test_an_abort_that_overtakes_its_request_takes_it_along() -> None:
    """Otherwise the abort would find no such room, and the request would then run although nobody waits for it."""
    messages = [prefill(1), prefill(2), Abort(room=1, reason="gone"), Abort(room=3, reason="gone")]
    assert control_first(messages) == [*messages[2:], messages[1]]


def test_order_within_a_kind_is_kept() -> None:
    messages = [
        prefill(2),
        HeartbeatAck(router_incarnation="r", sequence=1, known=True),
        prefill(1),
        Abort(room=7, reason=""),
        PeerLost(incarnation="p"),
    ]
    assert control_first(messages) == [messages[1], messages[3], messages[4], messages[0], messages[2]]


def test_messages_outside_the_inbox_are_counted(rig: Rig) -> None:
    rig.register()
    assert rig.router is not None
    rig.router.send(MAIN, b"\xc1")
    rig.say(Failed(room=1, code="x", message=""))  # a message of the router's own inbox
    rig.say(PeerLost(incarnation="p"))
    assert rig.receive() == [PeerLost(incarnation="p")]
    assert rig.link.refused_messages == 2


def test_what_cannot_be_sent_is_counted(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Dealer, "send", lambda dealer, frame: False)
    rig.link.send(Goodbye(incarnation=NODE))
    rig.link.send(Goodbye(incarnation=NODE))
    assert rig.link.unsent_messages == 2
