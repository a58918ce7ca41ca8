"""What nodes may send to the router, and how soon their death is noticed."""

from __future__ import annotations

import asyncio
import hashlib
import os
import select
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from typing import Any

import msgspec
import pytest
import zmq

from common.errors import InvalidRequest, NodeLost, Unavailable
from common.ipc import Dealer, bad_frames
from common.messages import decode_inbox
from common.messages.decode_inbox import Reserve
from common.messages.generation import ImageSpan, OutputToken, SamplingParams
from common.messages.identity import NodeCounters, NodeLoad, routing_id
from common.messages.image_inbox import LINK
from common.messages.node_inbox import Abort, HeartbeatAck, PeerLost, Registered, Rejected
from common.messages.protocol import CONTROL_PROTOCOL_VERSION, UNVERSIONED
from common.messages.router_inbox import (
    Failed,
    FirstToken,
    Goodbye,
    Heartbeat,
    PrefillDone,
    TokenRun,
    Tokens,
)
from common.messages.wire import encode
from common.node.router_link import RouterLink
from common.node.router_links import RouterLinks
from common.node_plan import RouterPlan
from common.observability import bounded_log
from router import control_plane
from router.dispatch.generation import GenerationRequest, PromptImage
from router.nodes.registry import SIGN_OF_LIFE
from tests.fakes.clock import Clock
from tests.fakes.fake_node import registration
from tests.fakes.router_rig import Client, legs, router_rig
from tests.fakes.waiting import PATIENCE, eventually


async def test_registration_is_repeatable() -> None:
    async with router_rig() as rig:
        node = await rig.node("prefill", "prefill-0")
        await node.register()
        await node.register()
        assert rig.registry.count("prefill") == 1


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"fingerprint": "e" * 64},
            "serves the model with fingerprint eeeeeeeeeeee, this router ffffffffffff",
        ),
        (
            {"protocol_version": CONTROL_PROTOCOL_VERSION + 1},
            f"decode-0 speaks version {CONTROL_PROTOCOL_VERSION + 1} of the control protocol, this process speaks "
            f"version {CONTROL_PROTOCOL_VERSION}: run the same version of tandem",
        ),
        ({"protocol_version": UNVERSIONED}, "decode-0 speaks a version from before version 1 of the control"),
        ({"page_size": 64}, "has pages of 64 tokens, the router's kv.page_size is 16"),
    ],
)
async def test_refusals_are_sentences(options: dict[str, object], sentence: str) -> None:
    async with router_rig() as rig:
        await rig.node("prefill", "prefill-0")
        odd = rig.fake("decode", "decode-0", **options)
        answer = await odd.register()
        assert isinstance(answer, Rejected)
        assert "decode-0" in answer.reason
        assert sentence in answer.reason
        assert rig.registry.count("decode") == 0


@pytest.mark.parametrize(
    ("frame", "sentence"),
    [
        (
            {"type": "Register", "protocol_version": CONTROL_PROTOCOL_VERSION + 1, "node": "in another form"},
            f"speaks version {CONTROL_PROTOCOL_VERSION + 1} of the",
        ),
        ({"type": "Register", "name": "decode-0"}, "speaks a version from before version 1 of the"),
    ],
)
async def test_a_registration_of_another_version_is_refused_with_a_sentence_even_if_it_cannot_be_decoded(
    frame: dict[str, object], sentence: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with router_rig() as rig:
        node = rig.fake("decode", "decode-0")
        node.say_raw(msgspec.msgpack.encode(frame))
        answer = await node.expect(Rejected)
        assert sentence in answer.reason
        assert answer.reason.startswith("decode-0 ")
        assert (rig.registry.count("decode"), rig.control.refused_messages) == (0, 0)
    logged = [record for record in caplog.records if record.message == "refused a node"]
    assert [record.fields["reason"] for record in logged] == [answer.reason]  # type: ignore[attr-defined]


async def test_a_malformed_registration_of_this_version_is_a_bad_frame() -> None:
    async with router_rig() as rig:
        node = rig.fake("decode", "decode-0")
        node.say_raw(
            msgspec.msgpack.encode({"type": "Register", "protocol_version": CONTROL_PROTOCOL_VERSION})
        )
        await eventually(lambda: rig.control.refused_messages == 1)
        assert await node.silence((Registered, Rejected), 0.2)


async def test_registered_names_the_version() -> None:
    async with router_rig() as rig:
        answer = await rig.fake("decode", "decode-0").register()
        assert isinstance(answer, Registered)
        assert answer.protocol_version == CONTROL_PROTOCOL_VERSION


async def test_a_flood_of_strangers_costs_no_node_and_few_log_lines(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """More sessions than the table holds, all of them opened after those of the nodes."""
    monkeypatch.setattr("common.ipc.sessions.MAX_SESSIONS", 4)
    monkeypatch.setattr(bounded_log, "WINDOW", 600.0)  # a slow test stays in the first window
    async with router_rig() as rig:
        prefill, decode = await rig.pair()
        for number in range(20):
            stranger = rig.fake("decode", f"stranger-{number}")
            del rig.expected[stranger.ref.name]
            answer = await stranger.register()
            assert isinstance(answer, Rejected)
            assert "is not in the router's cluster file" in answer.reason
        client = rig.client()
        await legs(prefill, decode)
        assert (prefill.dealer.resets, decode.dealer.resets) == (0, 0), "the router has forgotten no node"
        await client.leave()
    assert [each.message for each in caplog.records].count("refused a node") == bounded_log.FIRST


async def test_a_second_process_under_a_name_is_refused_while_the_first_lives() -> None:
    """Requests continue meanwhile, and the first process keeps the name."""
    clock = Clock()
    async with router_rig(clock) as rig:
        prefill, decode = await rig.pair()
        client = rig.client()
        reserve, _ = await legs(prefill, decode)
        second = rig.fake("decode", "decode-0")
        second.ask()
        assert await second.silence((Registered, Rejected), 0.2)
        clock.now += SIGN_OF_LIFE
        decode.beat()
        await decode.echo()
        answer = await second.register()
        assert isinstance(answer, Rejected)
        assert answer.reason.startswith(
            "decode-0 is already running as process 1 on host: stop that one first"
        )
        assert [node.incarnation for node in rig.registry if node.role == "decode"] == [
            decode.ref.incarnation
        ]
        first = FirstToken(room=reserve.room, token=OutputToken(7), finish_reason=None, cached_tokens=0)
        prefill.say(first)
        decode.tokens(reserve.room, 1, [8], "stop")
        await client.done()
        assert (client.ids, client.finish) == ([7, 8], "stop")


async def test_a_new_process_takes_over_the_name_of_a_dead_one() -> None:
    async with router_rig(placement_wait=300.0) as rig:
        prefill, decode = await rig.pair()
        client = rig.client()
        await legs(prefill, decode)
        fresh = rig.fake("decode", "decode-0")
        fresh.ask()
        assert await fresh.silence((Registered, Rejected), 0.2)
        rig.nodes.remove(decode)
        decode.close()
        assert isinstance(await fresh.register(), Registered)
        assert (await prefill.expect(PeerLost)).incarnation == decode.ref.incarnation
        again, _ = await legs(prefill, fresh)
        assert again.emitted == 0
        await client.leave()
        rig.nothing_left()


async def test_heartbeats_are_echoed_and_an_unknown_node_is_told_so() -> None:
    async with router_rig() as rig:
        node = rig.fake("decode", "decode-0")
        node.beat()
        assert await node.echo() == HeartbeatAck(
            router_incarnation="router-incarnation", sequence=1, known=False
        )
        await node.register()
        node.beat(load=NodeLoad(running=3, total_pages=7))
        assert await node.echo() == HeartbeatAck(
            router_incarnation="router-incarnation", sequence=2, known=True
        )
        known = rig.registry.get(node.ref.incarnation)
        assert known is not None
        assert known.load.running == 3


async def test_what_arrives_while_an_answer_is_sent_is_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sending consumes the edge of ZMQ's descriptor: the message must be found without waiting for a timer."""
    monkeypatch.setattr(control_plane, "SWEEP_INTERVAL", 3600.0)
    async with router_rig() as rig:
        first, second = await rig.pair()
        handle, spoke = rig.registry.heartbeat, False

        def interrupted(message: Heartbeat) -> bool:
            nonlocal spoke
            if not spoke:
                spoke = True
                second.beat()
                assert select.select([rig.control.socket.fileno()], [], [], PATIENCE)[0]
                time.sleep(0.01)  # ZMQ processes commands about once per millisecond
            return handle(message)

        monkeypatch.setattr(rig.registry, "heartbeat", interrupted)
        first.beat()
        assert (await first.echo()).known
        assert (await second.echo()).known


async def test_no_node_can_act_for_another() -> None:
    async with router_rig() as rig:
        prefill, decode = await rig.pair(0)
        other_prefill, other_decode = await rig.node("prefill", "zzz-0"), await rig.node("decode", "zzz-1")
        client = rig.client()
        reserve, _ = await legs(prefill, decode)
        room = reserve.room
        liars = (other_prefill, other_decode, rig.fake("decode", "stranger"))
        for liar in liars:
            liar.say(
                FirstToken(room=room, token=OutputToken(9), finish_reason="stop", cached_tokens=0),
                PrefillDone(room=room, stages={"x": 1.0}),
                Failed(room=room, code="internal_error", message="lies"),
                Tokens(runs=[TokenRun(room, 0, [OutputToken(9)], "stop")]),
                Goodbye(incarnation=decode.ref.incarnation),
            )
            liar.beat("draining", incarnation=decode.ref.incarnation)
        # Each node of the request sends a message that only the other one may send.
        decode.say(FirstToken(room=room, token=OutputToken(9), finish_reason="stop", cached_tokens=0))
        prefill.say(Tokens(runs=[TokenRun(room, 0, [OutputToken(9)], "stop")]))
        await asyncio.sleep(0.05)
        assert not client.task.done()
        assert client.ids == []
        assert rig.registry.count("decode") == 2
        prefill.say(FirstToken(room=room, token=OutputToken(50), finish_reason="stop", cached_tokens=0))
        await client.done()
        assert client.ids == [50]
        report = rig.dispatcher.timelines.get("r1")
        assert report is not None
        assert "prefill.x" not in report["stages"]


async def test_a_register_for_another_incarnation_is_counted() -> None:
    async with router_rig() as rig:
        node = await rig.node("decode", "decode-0")
        node.say(
            node.record.__class__(**{**_fields(node.record), "node": rig.fake("decode", "decode-1").ref})
        )
        await eventually(lambda: rig.control.refused_messages == 1)
        assert rig.registry.count("decode") == 1


def _fields(struct: object) -> dict[str, Any]:
    return {name: getattr(struct, name) for name in struct.__struct_fields__}  # type: ignore[attr-defined]


async def test_malformed_frames_are_counted_and_survived() -> None:
    async with router_rig() as rig:
        node = await rig.node("decode", "decode-0")
        good = encode(Failed(room=5, code="x", message="y"))
        frames = [b"", b"\x00", os.urandom(50), good[:-3], good.replace(b"Failed", b"Fialed"), b"\x93" * 5000]
        frames.append(encode(Abort(room=3, reason="not for routers")))
        for frame in frames:
            node.say_raw(frame)
        stranger = Dealer(rig.context, rig.control.address, "ü".encode())
        stranger.send(good)
        await eventually(lambda: rig.control.refused_messages == len(frames) + 1)
        stranger.close()
        node.beat()
        assert isinstance(await node.echo(), HeartbeatAck)


async def test_rooms_that_are_unknown_or_over_are_ignored() -> None:
    async with router_rig() as rig:
        prefill, decode = await rig.pair()
        for room in (1, 2**63 - 1):
            prefill.say(
                FirstToken(room=room, token=OutputToken(9), finish_reason=None, cached_tokens=0),
                PrefillDone(room=room, stages={}),
                Failed(room=room, code="no_such_code", message=""),
            )
            decode.tokens(room, 5, [1], "stop", finished=1.0)
        decode.beat()
        await decode.echo()
        assert rig.control.refused_messages == 0
        rig.nothing_left()


async def test_a_code_of_a_newer_node_is_an_internal_error() -> None:
    async with router_rig() as rig:
        prefill, decode = await rig.pair()
        client = rig.client()
        reserve, _ = await legs(prefill, decode)
        decode.say(Failed(room=reserve.room, code="flux_capacitor", message="88 mph"))
        await client.done()
        assert type(client.error).__name__ == "InternalError"


async def test_the_field_that_a_node_refuses_reaches_the_client() -> None:
    async with router_rig() as rig:
        prefill, decode = await rig.pair()
        client = rig.client()
        reserve, _ = await legs(prefill, decode)
        prefill.say(Failed.of(reserve.room, InvalidRequest("an image is broken", param="messages[1]")))
        await client.done()
        assert isinstance(client.error, InvalidRequest)
        assert (str(client.error), client.error.param) == ("an image is broken", "messages[1]")


def test_closed_sockets_are_probed_within_a_second() -> None:
    assert sum(control_plane.PROBE_PAUSES[:2]) < 0.5
    assert sum(control_plane.PROBE_PAUSES[:3]) < 1.0


async def test_a_closed_socket_is_noticed_without_heartbeats() -> None:
    """The registry's clock stands still, so it is not silence that reveals the loss."""
    async with router_rig() as rig:
        prefill, decode = await rig.pair()
        client = rig.client()
        await legs(prefill, decode)
        rig.nodes.remove(decode)
        decode.close()
        await eventually(lambda: rig.registry.count("decode") == 0)
        assert rig.registry.count("prefill") == 1, "the other one is still there"
        assert (await prefill.expect(PeerLost)).incarnation == decode.ref.incarnation
        await client.done()
        assert type(client.error).__name__ == "Unavailable"
        rig.nothing_left()


async def test_a_killed_process_is_noticed_without_heartbeats() -> None:
    """A separate process holds the sockets and is killed, so nothing is closed properly."""
    async with router_rig() as rig:
        node = rig.fake("decode", "decode-0")
        program = (
            "import sys, time, zmq\n"
            "from common.ipc import Dealer\n"
            "frame = bytes.fromhex(sys.argv[3])\n"
            "dealer = Dealer(zmq.Context(), sys.argv[1], sys.argv[2].encode())\n"
            "dealer.send(frame)\n"
            "time.sleep(600)\n"
        )
        import sys

        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            program,
            rig.control.address,
            "decode-0/" + "a" * 32,
            _as(node, "a" * 32).hex(),
        )
        try:
            await eventually(lambda: rig.registry.count("decode") == 1)
        finally:
            process.kill()
        await eventually(lambda: rig.registry.count("decode") == 0)
        await process.wait()


def _as(node: object, incarnation: str) -> bytes:
    register = node.record  # type: ignore[attr-defined]
    ref = msgspec.structs.replace(register.node, incarnation=incarnation)
    return encode(msgspec.structs.replace(register, node=ref))


async def test_a_closed_heartbeat_socket_is_no_proof_of_death() -> None:
    async with router_rig() as rig:
        node = await rig.node("decode", "decode-0")
        node.beat()
        await node.echo()
        node.beats.close()
        await asyncio.sleep(0.1)
        assert rig.registry.count("decode") == 1


async def test_silent_and_hung_nodes_are_lost() -> None:
    clock = Clock()
    async with router_rig(clock=clock) as rig:
        prefill, decode = await rig.pair()
        clock.now += 2.9
        decode.beat()
        await decode.echo()
        clock.now += 0.2  # the prefill node has been silent for 3.1 s
        await eventually(lambda: rig.registry.count("prefill") == 0)
        assert rig.registry.count("decode") == 1
        assert (await decode.expect(PeerLost)).incarnation == prefill.ref.incarnation
        decode.beat(loop_age_ms=5_100)
        await eventually(lambda: rig.registry.count("decode") == 0)
        await decode.echo()
        decode.beat(loop_age_ms=0)
        ack = await decode.echo()
        assert isinstance(ack, HeartbeatAck)
        assert not ack.known, "given up: it has to register again"
        await decode.register()
        assert rig.registry.count("decode") == 1


async def test_a_node_that_says_goodbye_is_forgotten() -> None:
    async with router_rig() as rig:
        _, decode = await rig.pair()
        decode.say(Goodbye(incarnation=decode.ref.incarnation))
        await eventually(lambda: rig.registry.count("decode") == 0)
        assert rig.registry.count("prefill") == 1


async def test_the_sweep_survives_an_error() -> None:
    """Whatever fails while one node is removed, later silence is still noticed."""
    clock = Clock()
    async with router_rig(clock=clock) as rig:
        await rig.pair()
        inner, raised = rig.registry.sweep, 0

        def sweep(stalled: float = 0.0) -> None:
            nonlocal raised
            if raised == 0:
                raised += 1
                raise RuntimeError("a defect")
            inner(stalled)

        rig.registry.sweep = sweep  # type: ignore[method-assign]
        await eventually(lambda: raised == 1)
        clock.now += 3.5
        await eventually(lambda: rig.registry.count("prefill") + rig.registry.count("decode") == 0)


async def test_a_router_that_stalls_does_not_take_it_for_silence() -> None:
    async with router_rig() as rig:
        stalls: list[float] = []
        rig.registry.sweep = stalls.append  # type: ignore[method-assign, assignment]
        await eventually(lambda: stalls)
        time.sleep(2 * control_plane.SWEEP_INTERVAL)
        await eventually(lambda: max(stalls) >= control_plane.SWEEP_INTERVAL / 2)


async def test_nothing_is_touched_after_close(caplog: pytest.LogCaptureFixture) -> None:
    async with router_rig() as rig:
        _, decode = await rig.pair()
        decode.close()
        rig.nodes.remove(decode)
        await asyncio.sleep(0.01)
        rig.control.send("nobody", PeerLost(incarnation="p"))
    await asyncio.sleep(0.6)  # for probes that are already scheduled
    assert not [record for record in caplog.records if record.name == "asyncio"]


@pytest.mark.parametrize("attempt", range(3))
async def test_last_messages_of_a_leaving_node_arrive(attempt: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A drained node sends its last tokens and Goodbye and closes at once: none of it may be dropped."""
    monkeypatch.setattr("common.ipc.channel.LINGER_MS", 60_000)  # even if this machine is busy for a while
    async with router_rig() as rig:
        prefill = await rig.node("prefill", "prefill-0")
        rig.expect("decode", "decode-0")
        register = registration("decode", "decode-0")
        context = zmq.Context[zmq.Socket[bytes]]()
        plan = RouterPlan(addresses=(rig.control.address,), heartbeat_interval=0.1, timeout=600.0)
        link = RouterLink(context, plan, rig.control.address, register, decode_inbox.codec, rig.log)
        RouterLinks([link]).publish("up", NodeLoad(total_pages=100, free_pages=100), NodeCounters())
        link.start()

        def drain_until(kind: type[Reserve] | None) -> Reserve | None:
            deadline = time.monotonic() + PATIENCE
            while time.monotonic() < deadline:
                for message in link.drain():
                    if kind is not None and isinstance(message, kind):
                        return message
                if kind is None and link.registered:
                    return None
                time.sleep(0.001)
            raise AssertionError("nothing came")

        await asyncio.to_thread(drain_until, None)
        client = rig.client(max_tokens=3000)
        reserve = await asyncio.to_thread(drain_until, Reserve)
        assert reserve is not None
        room = reserve.room
        prefill.say(FirstToken(room=room, token=OutputToken(0), finish_reason=None, cached_tokens=0))
        for offset in range(1, 3000):
            link.send(
                Tokens(runs=[TokenRun(room, offset, [OutputToken(1)], "length" if offset == 2999 else None)])
            )
        link.send(Goodbye(incarnation=register.node.incarnation))
        await asyncio.to_thread(lambda: (link.close(), context.term()))
        await client.done()
        assert (client.error, len(client.ids), client.finish) == (None, 3000, "length")


async def test_many_sockets_that_close_cost_one_row_of_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that connects and disconnects a thousand times a second must not fill the loop with timers."""
    monkeypatch.setattr(control_plane, "PROBE_PAUSES", (3600.0, 7200.0))
    loop = asyncio.get_running_loop()
    call_later, timers = loop.call_later, list[tuple[float, Callable[[], object]]]()

    def noted(delay: float, callback: Callable[..., object], *args: Any) -> asyncio.TimerHandle:
        if delay in control_plane.PROBE_PAUSES:
            timers.append((delay, partial(callback, *args)))
        return call_later(delay, callback, *args)

    monkeypatch.setattr(loop, "call_later", noted)
    async with router_rig() as rig:
        noticed = 0

        def notice() -> None:
            nonlocal noticed
            noticed += 1

        monkeypatch.setattr(rig.control.freed_memory, "connection_ended", notice)

        async def close_one() -> None:
            before = noticed
            with closing(Dealer(rig.context, rig.control.address, b"stranger/1")) as stranger:
                stranger.datagram(b"x")
                await eventually(lambda: rig.control.refused_messages > before)
            await eventually(lambda: noticed > before)

        for _ in range(5):
            await close_one()
        assert [delay for delay, _ in timers] == [3600.0]
        timers[0][1]()  # the first probe: the next is scheduled, and a further end begins a row of its own
        await close_one()
        assert [delay for delay, _ in timers] == [3600.0, 7200.0, 3600.0]


async def test_sending_to_other_nodes_postpones_no_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy router sends in every turn of its loop, which says nothing about messages that wait to be read."""
    monkeypatch.setattr(control_plane, "PROBE_PAUSES", (3600.0, 7200.0))
    loop = asyncio.get_running_loop()
    call_later, probes = loop.call_later, list[Callable[[], object]]()

    def noted(delay: float, callback: Callable[..., object], *args: Any) -> asyncio.TimerHandle:
        if delay in control_plane.PROBE_PAUSES:
            probes.append(partial(callback, *args))
        return call_later(delay, callback, *args)

    monkeypatch.setattr(loop, "call_later", noted)
    async with router_rig() as rig:
        prefill, decode = await rig.pair()
        rig.nodes.remove(decode)
        decode.close()
        await eventually(lambda: probes)
        lost = routing_id(decode.ref.name, decode.ref.incarnation).encode()
        # Its pipe disappears a moment after the event that begins the probes.
        await eventually(lambda: not rig.control.socket.reachable(lost))
        tries = 0
        while rig.registry.count("decode") and tries < control_plane.MAX_POSTPONED // 2:
            tries += 1
            await asyncio.sleep(0.01)
            rig.control.send(routing_id(prefill.ref.name, prefill.ref.incarnation), PeerLost(incarnation="p"))
            probes[-1]()
        assert rig.registry.count("decode") == 0


async def test_images_that_wait_for_a_stalled_node_are_bounded() -> None:
    """Clients that send requests and disconnect cannot fill the router's memory."""
    data = b"x" * (1 << 20)
    image = PromptImage(ImageSpan(0, 1, hashlib.sha256(data).digest()), data)
    asked = GenerationRequest("r", [1, 2, 3], SamplingParams(max_tokens=9), images=(image,))
    async with router_rig(queued_bytes=5 << 20) as rig:
        prefill, _ = await rig.pair()
        identity = routing_id(prefill.ref.name, prefill.ref.incarnation, LINK)
        with closing(Dealer(rig.context, rig.control.address, identity.encode(), received=1)) as stalled:
            await eventually(lambda: rig.control.send(identity, PeerLost(incarnation="p")))

            async def place() -> BaseException | None:
                client = Client(rig.dispatcher.generate(asked))
                await eventually(lambda: client.task.done() or any(node.rooms for node in rig.registry))
                await asyncio.sleep(0.01)
                await client.leave()
                return client.error

            failures = [await place() for _ in range(10)]
            assert failures[:4] == [None] * 4
            assert isinstance(failures[-1], NodeLost | Unavailable)
            assert rig.registry.count("prefill") == 1
            async with asyncio.timeout(PATIENCE):
                while await place() is not None:  # until the node accepts them again
                    stalled.drain()
                    prefill.beat()
        rig.nothing_left()


async def test_a_node_that_is_not_in_the_cluster_file_is_rejected_with_a_sentence() -> None:
    async with router_rig() as rig:
        node = rig.fake("prefill", "prefill-9")
        del rig.expected["prefill-9"]
        answer = await node.register()
        assert isinstance(answer, Rejected)
        assert "'prefill-9' is not in the router's cluster file" in answer.reason
        assert rig.registry.count("prefill") == 0


async def test_tokens_outside_of_the_vocabulary_do_not_reach_the_client() -> None:
    async with router_rig() as rig:
        prefill, decode = await rig.pair()
        client = rig.client()
        reserve, _ = await legs(prefill, decode)
        room = reserve.room
        prefill.say(FirstToken(room=room, token=OutputToken(50_000), finish_reason=None, cached_tokens=0))
        decode.tokens(room, 0, [50_000])
        await eventually(lambda: rig.control.refused_messages == 2)
        prefill.say(FirstToken(room=room, token=OutputToken(49_999), finish_reason=None, cached_tokens=0))
        decode.tokens(room, 1, [7], "stop")
        await client.done()
        assert client.ids == [49_999, 7]


async def test_a_node_that_sends_garbage_is_lost_and_its_successor_is_served() -> None:
    """Its process ends on Rejected; the other node and the client notice nothing."""
    async with router_rig() as rig:
        prefill, liar = await rig.pair()
        client = rig.client()
        await legs(prefill, liar)
        for _ in range(bad_frames.LIMIT):
            liar.say_raw(b"\x93" * 50)
        await eventually(lambda: rig.registry.count("decode") == 0)
        assert (await liar.expect(Rejected)).reason == control_plane.TOO_MANY_BAD_FRAMES
        assert (await prefill.expect(PeerLost)).incarnation == liar.ref.incarnation
        assert rig.registry.count("prefill") == 1
        liar.say(liar.record)
        await asyncio.sleep(0.05)
        assert rig.registry.count("decode") == 0, "the old incarnation is not listened to"
        successor = await rig.node("decode", "decode-0")
        await legs(prefill, successor)
        assert rig.registry.count("decode") == 1
        await client.leave()


async def test_a_flood_leaves_the_loop_its_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """However much one node sends, other callbacks run between two batches of it, and other nodes are heard."""
    async with router_rig() as rig:
        flood, other = await rig.node("decode", "decode-0"), await rig.node("decode", "decode-1")
        turns = 0
        done = asyncio.Event()

        async def count() -> None:
            nonlocal turns
            while not done.is_set():
                turns += 1
                await asyncio.sleep(0)

        message = Failed(room=1, code="x", message="y")
        for _ in range(5_000):
            flood.say(message)
        other.beat(load=NodeLoad(running=3))
        counting = asyncio.create_task(count())
        read: list[int] = []
        drain = rig.control.socket.drain

        def counted(most: int, signalled: bool) -> list[tuple[bytes, bytes]]:
            batch = drain(most, signalled)
            read.append(len(batch))
            return batch

        monkeypatch.setattr(rig.control.socket, "drain", counted)
        await eventually(lambda: sum(read) >= 5_001)
        done.set()
        await counting
        assert max(read) <= control_plane.FRAMES_PER_TURN
        assert turns >= 10
        await other.echo()


async def test_who_knows_a_name_and_an_incarnation_does_not_get_its_messages() -> None:
    """Decode nodes know prefill nodes' incarnations, but the routing id of a control link also contains a secret."""
    async with router_rig() as rig:
        prefill = await rig.node("prefill", "prefill-0", link_secret="s" * 32)
        decode = await rig.node("decode", "decode-0")
        identity = routing_id(prefill.ref.name, prefill.ref.incarnation).encode()
        with closing(Dealer(rig.context, rig.control.address, identity)) as thief:
            thief.send(encode(Goodbye(incarnation="not mine")))
            client = rig.client()
            await legs(prefill, decode)
            assert thief.drain() == []
            await client.leave()


async def test_a_process_with_the_same_key_cannot_speak_for_a_registered_one() -> None:
    """Nodes of one pattern share a key: the secret of its links tells a node from others that know its incarnation."""
    async with router_rig() as rig:
        _, decode = (
            await rig.node("prefill", "prefill-0"),
            await rig.node("decode", "decode-0", link_secret="s" * 32),
        )
        identity = routing_id(decode.ref.name, decode.ref.incarnation, "guess").encode()
        with closing(Dealer(rig.context, rig.control.address, identity)) as impostor:
            impostor.send(encode(Goodbye(incarnation=decode.ref.incarnation)))
            await eventually(lambda: rig.control.refused_messages == 1)
        assert rig.registry.count("decode") == 1
        await decode.register()
        decode.beat("draining")
        await eventually(lambda: rig.registry.count("decode") == 0)
        assert rig.control.refused_messages == 1
