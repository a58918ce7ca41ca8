"""One request end to end, against fake nodes that use the real messages."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from common.errors import (
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    NodeLost,
    Overloaded,
    Preempted,
    TransferFailed,
    Unavailable,
)
from common.messages.decode_inbox import Reserve
from common.messages.generation import OutputToken, SamplingParams
from common.messages.identity import Role
from common.messages.node_inbox import Abort
from common.messages.prefill_inbox import Prefill
from common.messages.router_inbox import Failed, FirstToken, Goodbye, PrefillDone, TokenRun, Tokens
from router.dispatch.generation import AnswerComplete, GenerationRequest, PromptBatch
from router.dispatch.retry_budget import BURST
from tests.fakes.clock import Clock
from tests.fakes.fake_node import FakeNode
from tests.fakes.router_rig import RouterRig, legs, router_rig
from tests.fakes.served_series import rendered
from tests.fakes.waiting import PATIENCE, eventually


def first_token(prefill: FakeNode, room: int, token: int, finish: str | None = None, cached: int = 2) -> None:
    prefill.say(FirstToken(room=room, token=OutputToken(token), finish_reason=finish, cached_tokens=cached))


async def test_a_request_passes_through_both_nodes() -> None:
    async with router_rig() as rig:
        prefill, decode = await rig.pair()
        client = rig.client([1, 2, 3])
        reserve, prompt = await legs(prefill, decode)
        assert prompt.token_ids == [1, 2, 3]
        assert 0 < prompt.deadline_ms <= 600_000
        first_token(prefill, prompt.room, 50)
        await client.until(1)
        prefill.say(PrefillDone(room=prompt.room, stages={"queued": 0.1}))
        decode.tokens(reserve.room, 1, [51])
        decode.tokens(reserve.room, 2, [52], "stop", first_decode=0.2, finished=0.3)
        await client.done()
        assert (client.ids, client.finish, client.error) == ([50, 51, 52], "stop", None)
        assert client.deltas[0].cached_tokens == 2
        assert all(delta.cached_tokens is None for delta in client.deltas[1:])
        assert all(delta.finish_reason is None for delta in client.deltas[:-1])
        assert await prefill.silence(Abort)
        assert await decode.silence(Abort)
        rig.nothing_left()
        report = rig.dispatcher.timelines.get("r1")
        assert report is not None
        assert report["outcome"] == "stop"
        stages = {"received", "placed", "first_token", "finished", "prefill.queued", "decode.finished"}
        await eventually(lambda: stages <= set(rig.dispatcher.timelines.get("r1")["stages"]))  # type: ignore[index]


async def test_the_end_with_the_first_token_releases_the_reservation() -> None:
    async with router_rig() as rig:
        prefill, decode = await rig.pair()
        client = rig.client(max_tokens=1)
        reserve, _ = await legs(prefill, decode)
        first_token(prefill, reserve.room, 50, "length")
        await client.done()
        assert (client.ids, client.finish) == ([50], "length")
        assert (await decode.expect(Abort)).room == reserve.room
        assert await prefill.silence(Abort)
        rig.nothing_left()


async def test_a_fast_decode_node_does_not_abort_the_prefill_leg() -> None:
    """All tokens are here before the prefill node reports that it is done, which it is about to do."""
    async with router_rig() as rig:
        prefill, decode = await rig.pair()
        client = rig.client(max_tokens=2)
        reserve, _ = await legs(prefill, decode)
        first_token(prefill, reserve.room, 50)
        await client.until(1)
        decode.tokens(reserve.room, 1, [51], "length", finished=0.3)
        await client.done()
        assert await prefill.silence(Abort)
        prefill.say(PrefillDone(room=reserve.room, stages={"record_sent": 0.25}))
        await eventually(lambda: "prefill.record_sent" in rig.dispatcher.timelines.get("r1")["stages"])  # type: ignore[index]
        rig.nothing_left()


async def _first_of(kind: type[Reserve], *nodes: FakeNode) -> tuple[FakeNode, Reserve]:
    async with asyncio.timeout(PATIENCE):
        while True:
            for node in nodes:
                if any(isinstance(message, kind) for message in node.received()):
                    return node, await node.expect(kind)
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("said", [0, 1, 3])
@pytest.mark.parametrize("cause", ["decode lost", "prefill lost", "transfer", "preempted"])
async def test_a_request_is_placed_again_with_its_tokens_so_far(cause: str, said: int) -> None:
    async with router_rig() as rig:
        prefill, decode = await rig.pair(0)
        client = rig.client([1, 2, 3])
        reserve, _ = await legs(prefill, decode)
        text = [50, 51, 52][:said]
        if said:
            first_token(prefill, reserve.room, 50)
            decode.tokens(reserve.room, 1, text[1:])
            await client.until(said)
        other_prefill, other_decode = await rig.pair(1)
        if cause == "decode lost":
            decode.say(Goodbye(incarnation=decode.ref.incarnation))
        elif cause == "prefill lost":
            prefill.say(Goodbye(incarnation=prefill.ref.incarnation))
        elif cause == "transfer":
            decode.say(Failed(room=reserve.room, code="transfer_failed", message="a page differs"))
        else:
            decode.say(Failed(room=reserve.room, code="preempted", message="no pages"))
        new_decode, again = await _first_of(Reserve, decode, other_decode)
        assert new_decode is other_decode or cause == "prefill lost"
        assert again.room != reserve.room
        assert (again.token_ids, again.emitted) == ([1, 2, 3, *text], said)
        assert again.sampling == reserve.sampling, "max_tokens counts from the original prompt"
        assert again.deadline_ms <= reserve.deadline_ms
        new_prefill = prefill if again.prefill.name == "prefill-0" else other_prefill
        assert new_prefill is other_prefill or cause in ("decode lost", "preempted")
        prompt = await new_prefill.expect(Prefill)
        # Late messages of the old attempt change nothing.
        if cause in ("transfer", "preempted"):
            decode.tokens(reserve.room, said, [99], "stop")
        first_token(new_prefill, prompt.room, 60, cached=3)
        new_decode.tokens(prompt.room, 1, [61], "length")
        await client.done()
        assert (client.ids, client.finish, client.error) == ([*text, 60, 61], "length", None)
        assert client.deltas[0].cached_tokens == (2 if said else 3)
        # A node that still held the first attempt was told to stop; the one that ended it was not.
        for node in (prefill, decode):
            if node is not (prefill if cause == "prefill lost" else decode):
                assert (await node.expect(Abort)).room == reserve.room
            assert not [m for m in node.received() if isinstance(m, Abort) and m.room == reserve.room]
        rig.nothing_left()


async def test_tokens_that_came_before_the_failure_are_not_lost() -> None:
    """They arrive in the same batch as the failure: the client gets them, and the continuation counts them."""
    async with router_rig() as rig:
        prefill, decode = await rig.pair()
        client = rig.client([1])
        reserve, _ = await legs(prefill, decode)
        decode.tokens(reserve.room, 1, [51, 52])
        await asyncio.sleep(0.01)
        first_token(prefill, reserve.room, 50)
        decode.say(Failed(room=reserve.room, code="preempted", message="no pages"))
        again, prompt = await legs(prefill, decode)
        assert again.token_ids[: again.emitted + 1][0] == 1
        assert again.token_ids == [1, 50, 51, 52][: 1 + again.emitted]
        rest = [50, 51, 52, 53, 54][again.emitted :]
        first_token(prefill, prompt.room, rest[0])
        decode.tokens(prompt.room, 1, rest[1:], "length")
        await client.done()
        assert client.ids == [50, 51, 52, 53, 54]


@pytest.mark.parametrize(
    ("code", "error"),
    [("invalid_value", InvalidRequest), ("overloaded", Overloaded), ("internal_error", InternalError)],
)
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_errors_that_another_attempt_cannot_fix_pass_through(
    role: str, code: str, error: type[Exception]
) -> None:
    """The other node is told to stop: a reservation that is too large leaves no prompt, nor the reverse."""
    async with router_rig() as rig:
        prefill, decode = await rig.pair()
        client = rig.client()
        reserve, _ = await legs(prefill, decode)
        teller, other = (prefill, decode) if role == "prefill" else (decode, prefill)
        teller.say(Failed(room=reserve.room, code=code, message="too large; lower max_tokens"))
        await client.done()
        assert isinstance(client.error, error)
        assert str(client.error) == "too large; lower max_tokens"
        assert (await other.expect(Abort)).room == reserve.room
        assert await teller.silence(Abort)
        rig.nothing_left()


@pytest.mark.parametrize("room_comes", [True, False])
async def test_a_full_queue_keeps_a_request_with_text_waiting(room_comes: bool) -> None:
    """A new request is refused with 503; one with text has a client that reads, so it waits for placement_wait."""
    async with router_rig(placement_wait=0.3) as rig:  # enough for the first pause, and never for two
        prefill, decode = await rig.pair()
        client = rig.client([1])
        reserve, _ = await legs(prefill, decode)
        first_token(prefill, reserve.room, 50)
        await client.until(1)
        decode.say(Failed(room=reserve.room, code="preempted", message="no pages"))
        for _ in range(1 if room_comes else 2):
            again, _ = await legs(prefill, decode)
            prefill.say(Failed(room=again.room, code="overloaded", message="the queue is full"))
        if room_comes:
            again, _ = await legs(prefill, decode)
            assert again.token_ids == [1, 50]
            first_token(prefill, again.room, 51)
            decode.tokens(again.room, 1, [52], "length")
        await client.done()
        assert client.ids == ([50, 51, 52] if room_comes else [50])
        assert isinstance(client.error, Overloaded) != room_comes
        rig.nothing_left()


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_new_request_leaves_a_full_queue_for_another_node(role: Role) -> None:
    """If all are full the client is told so, as by a single node."""
    async with router_rig() as rig:
        nodes = {"prefill": [await rig.node("prefill", "p")], "decode": [await rig.node("decode", "d")]}
        nodes[role].append(await rig.node(role, "other"))
        client = rig.client()

        async def refuse(node: FakeNode) -> None:
            if role == "prefill":
                room = (await node.expect(Prefill)).room
            else:
                room = (await node.expect(Reserve)).room
            node.say(Failed(room=room, code="overloaded", message="the queue is full"))

        await asyncio.gather(*(refuse(each) for each in nodes[role]))
        await client.done()
        assert isinstance(client.error, Overloaded)
        assert client.ids == []
        rig.nothing_left()


@pytest.mark.parametrize("where", ["between tries", "waiting for a node", "placed"])
async def test_shutdown_reaches_requests_that_are_between_nodes(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Only the shutdown ends a pause.
    monkeypatch.setattr("router.dispatch.retries.FULL_QUEUE_SECONDS", 2 * PATIENCE)
    async with router_rig(placement_wait=300.0) as rig:
        prefill, decode = await rig.pair()
        client = rig.client([1])
        reserve, _ = await legs(prefill, decode)
        first_token(prefill, reserve.room, 50)
        await client.until(1)
        if where == "between tries":
            decode.say(Failed(room=reserve.room, code="preempted", message="no pages"))
            again, _ = await legs(prefill, decode)
            decode.say(Failed(room=again.room, code="overloaded", message="the queue is full"))
            assert (await prefill.expect(Abort)).room == reserve.room
            assert (await prefill.expect(Abort)).room == again.room
        elif where == "waiting for a node":
            decode.say(Goodbye(incarnation=decode.ref.incarnation))
            assert (await prefill.expect(Abort)).room == reserve.room
        rig.dispatcher.end_all(Unavailable("the router is going away"))
        await client.done()
        assert str(client.error) == "the router is going away"
        assert client.ids == [50]
        rig.nothing_left()


async def test_attempts_are_bounded() -> None:
    async with router_rig(max_attempts=3) as rig:
        prefill, decode = await rig.pair()
        client = rig.client()
        for _ in range(3):
            reserve, _ = await legs(prefill, decode)
            decode.say(Failed(room=reserve.room, code="transfer_failed", message="no"))
        await client.done()
        assert isinstance(client.error, TransferFailed)
        assert await prefill.silence(Prefill)
        rig.nothing_left()


@pytest.mark.parametrize("says", [True, False])
async def test_preemption_counts_as_a_failure_only_without_new_tokens(says: bool) -> None:
    """A small pool must not end a request that makes progress with every placement."""
    async with router_rig(max_attempts=3) as rig:
        prefill, decode = await rig.pair()
        client = rig.client(max_tokens=10)
        for count in range(5 if says else 3):
            reserve, prompt = await legs(prefill, decode)
            if says:
                first_token(prefill, prompt.room, 50 + count)
                await client.until(count + 1)
            decode.say(Failed(room=reserve.room, code="preempted", message="no pages"))
        if says:
            _, prompt = await legs(prefill, decode)
            assert prompt.emitted == 5
            first_token(prefill, prompt.room, 55, "stop")
        await client.done()
        assert client.ids == ([50, 51, 52, 53, 54, 55] if says else [])
        assert isinstance(client.error, type(None) if says else Preempted)
        assert await prefill.silence(Prefill)
        rig.nothing_left()


async def test_another_try_prefers_nodes_that_have_not_failed() -> None:
    """A node that just began to drain refuses requests: three attempts must not all go there."""
    async with router_rig() as rig:
        prefill = await rig.node("prefill", "prefill-0")
        draining = await rig.node("decode", "decode-0")
        good = await rig.node("decode", "decode-1")
        for _ in range(3):
            client = rig.client()
            while True:
                prompt = await prefill.expect(Prefill)
                if prompt.decode == good.ref.incarnation:
                    break
                refused = await draining.expect(Reserve)
                draining.say(
                    Failed(room=refused.room, code="node_lost", message="this decode node is draining")
                )
            first_token(prefill, prompt.room, 50, "stop")
            await client.done()
            assert client.finish == "stop", client.error
        rig.nothing_left()
        counts = [m for m in draining.received() if isinstance(m, Reserve)]
        assert not counts


@pytest.mark.parametrize("tokens", [0, 1, 2])
async def test_a_client_that_leaves_frees_both_nodes(tokens: int) -> None:
    async with router_rig() as rig:
        prefill, decode = await rig.pair()
        client = rig.client()
        reserve, _ = await legs(prefill, decode)
        for offset in range(tokens):
            if offset == 0:
                first_token(prefill, reserve.room, 50)
            else:
                decode.tokens(reserve.room, offset, [50 + offset])
        await client.until(tokens)
        await client.leave()
        assert (await prefill.expect(Abort)).room == reserve.room
        assert (await decode.expect(Abort)).room == reserve.room
        rig.nothing_left()
        report = rig.dispatcher.timelines.get("r1")
        assert report is not None
        assert report["outcome"] == "client gone"


async def test_a_defect_is_not_counted_as_a_client_that_left(monkeypatch: pytest.MonkeyPatch) -> None:
    async with router_rig() as rig:

        def defect(request: object) -> int | None:
            raise ZeroDivisionError("a defect")

        monkeypatch.setattr(rig.dispatcher.admission, "let_in", defect)
        client = await rig.client().done()
        assert isinstance(client.error, ZeroDivisionError)
        report = rig.dispatcher.timelines.get("r1")
        assert report is not None
        assert report["outcome"] == "error: internal_error"


async def test_a_prompt_whose_sibling_failed_is_counted_as_that() -> None:
    async with router_rig() as rig:
        prefill, decode = await rig.pair()
        batch = PromptBatch()
        client = rig.client(batch=batch)
        await legs(prefill, decode)
        batch.failed = True
        await client.leave()
        report = rig.dispatcher.timelines.get("r1")
        assert report is not None
        assert report["outcome"] == "sibling failed"
        shown = rendered(rig.metrics)[0]
        assert b'tandem_request_errors_total{code="sibling_failed"} 1.0' in shown
        assert b"client_gone" not in shown


async def test_closing_the_generator_between_two_tokens_frees_at_once() -> None:
    """aclose at the yield, not at an await: neither garbage collection nor another turn of the loop is needed."""
    async with router_rig() as rig:
        prefill, decode = await rig.pair()
        deltas = rig.dispatcher.generate(_request())
        reading = asyncio.ensure_future(anext(deltas))
        reserve, _ = await legs(prefill, decode)
        first_token(prefill, reserve.room, 50)
        await reading
        await deltas.aclose()
        rig.nothing_left()
        assert (await decode.expect(Abort)).room == reserve.room
        assert (await prefill.expect(Abort)).room == reserve.room


async def test_a_reader_that_stops_early_on_purpose_is_no_lost_client() -> None:
    """A stop string ends the answer: both nodes are freed, and it counts as a success."""
    async with router_rig() as rig:
        prefill, decode = await rig.pair()
        deltas = rig.dispatcher.generate(_request())
        first = asyncio.ensure_future(anext(deltas))
        _, prompt = await legs(prefill, decode)
        first_token(prefill, prompt.room, 50)
        assert [token.id for token in (await first).tokens] == [50]
        with pytest.raises(StopAsyncIteration):
            await deltas.athrow(AnswerComplete())
        assert (await prefill.expect(Abort)).room == prompt.room
        assert (await decode.expect(Abort)).room == prompt.room
        rig.nothing_left()
        report = rig.dispatcher.timelines.get("r9")
        assert report is not None
        assert report["outcome"] == "stop"


async def test_the_accept_length_of_an_answer_that_a_stop_string_ends() -> None:
    """It is that of the answer, although the decode node has not reported any and has sent more tokens."""
    async with router_rig() as rig:
        prefill, decode = await rig.pair()
        request = _request()
        deltas = rig.dispatcher.generate(request)
        first = asyncio.ensure_future(anext(deltas))
        _, prompt = await legs(prefill, decode)
        first_token(prefill, prompt.room, 50)
        await first
        decode.say(
            Tokens(runs=[TokenRun(prompt.room, 1, [OutputToken(each) for each in range(4)], verified=True)])
        )
        await anext(deltas)
        request.steps.end(3)
        with pytest.raises(StopAsyncIteration):
            await deltas.athrow(AnswerComplete())
        report = rig.dispatcher.timelines.get("r9")
        assert report is not None
        assert report["accept_length"] == 2.0


async def test_leaving_while_a_retry_waits_for_a_node() -> None:
    async with router_rig(placement_wait=300.0) as rig:
        prefill, decode = await rig.pair()
        client = rig.client()
        await legs(prefill, decode)
        decode.say(Goodbye(incarnation=decode.ref.incarnation))
        await prefill.expect(Abort)
        await client.leave()
        rig.nothing_left()


def _request() -> GenerationRequest:
    return GenerationRequest("r9", [1, 2], SamplingParams(max_tokens=5))


async def test_a_request_ends_at_its_deadline() -> None:
    async with router_rig(request_timeout=0.5) as rig:
        prefill, decode = await rig.pair()
        client = rig.client()
        reserve, _ = await legs(prefill, decode)
        assert reserve.deadline_ms <= 500
        await client.done()
        assert isinstance(client.error, DeadlineExceeded)
        assert "ask for fewer tokens" in str(client.error)
        assert (await decode.expect(Abort)).room == reserve.room
        assert (await prefill.expect(Abort)).room == reserve.room
        rig.nothing_left()


async def test_no_more_requests_than_allowed() -> None:
    async with router_rig(max_requests=2) as rig:
        prefill, decode = await rig.pair()
        clients = [rig.client() for _ in range(3)]
        await clients[2].done()
        assert isinstance(clients[2].error, Overloaded)
        assert b'tandem_request_errors_total{code="overloaded"} 1.0' in rendered(rig.metrics)[0]
        assert rig.dispatcher.timelines.get("r1")["outcome"] == "running", "refusals push nothing out"  # type: ignore[index]
        for _ in range(2):
            _, prompt = await legs(prefill, decode)
            first_token(prefill, prompt.room, 50, "stop")
        for client in clients[:2]:
            assert (await client.done()).finish == "stop"
        rig.nothing_left()


async def test_requests_that_wait_for_room_show_in_the_metrics() -> None:
    """They are in no node's queue, but autoscaling depends on them."""
    async with router_rig(requests_per_node=1, queue_wait=600.0) as rig:
        prefill, decode = await rig.pair()
        clients = [rig.client() for _ in range(3)]
        await eventually(lambda: b"tandem_requests_waiting_for_room 2.0" in rendered(rig.metrics)[0])
        for _ in clients:
            _, prompt = await legs(prefill, decode)
            first_token(prefill, prompt.room, 50, "stop")
        for client in clients:
            assert (await client.done()).finish == "stop"
        assert b"tandem_requests_waiting_for_room 0.0" in rendered(rig.metrics)[0]
        rig.nothing_left()


async def test_a_new_request_does_not_wait_for_a_node_that_is_not_there() -> None:
    async with router_rig(placement_wait=300.0) as rig:
        for missing in ("prefill", "decode"):
            client = await rig.client().done()
            assert isinstance(client.error, Unavailable)
            assert f"no {missing} node can take requests" in str(client.error)
            if missing == "prefill":
                await rig.node("prefill", "prefill-0")
        rig.nothing_left()


async def test_a_retry_waits_for_a_node_to_come() -> None:
    async with router_rig(placement_wait=300.0) as rig:
        prefill, decode = await rig.pair()
        client = rig.client([1])
        reserve, _ = await legs(prefill, decode)
        first_token(prefill, reserve.room, 50)
        await client.until(1)
        decode.say(Goodbye(incarnation=decode.ref.incarnation))
        await prefill.expect(Abort)
        await asyncio.sleep(0.02)
        assert not client.task.done()
        fresh = await rig.node("decode", "decode-9")
        again, _ = await legs(prefill, fresh)
        assert again.token_ids == [1, 50]
        first_token(prefill, again.room, 51, "length")
        await client.done()
        assert (client.ids, client.finish) == ([50, 51], "length")


async def test_a_retry_does_not_wait_for_ever() -> None:
    async with router_rig(placement_wait=0.05) as rig:
        prefill, decode = await rig.pair()
        client = rig.client()
        await legs(prefill, decode)
        decode.say(Goodbye(incarnation=decode.ref.incarnation))
        await client.done()
        assert isinstance(client.error, Unavailable)
        rig.nothing_left()


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("comes", [True, False])
async def test_a_new_request_waits_for_a_node_that_is_expected_back(role: Role, comes: bool) -> None:
    """The only node of a role restarts: its requests wait, and are answered with 503 if it does not return."""
    wait = 300.0 if comes else 0.05
    async with router_rig(placement_wait=wait, configured={role: [f"{role}-0"]}) as rig:
        prefill, decode = await rig.pair()
        gone = prefill if role == "prefill" else decode
        gone.say(Goodbye(incarnation=gone.ref.incarnation))
        await eventually(lambda: not rig.registry.count(role))
        clients = [rig.client() for _ in range(3)]
        if comes:
            await asyncio.sleep(0.02)
            assert not any(client.task.done() for client in clients)
            fresh = await rig.node(role, f"{role}-0")
            pair = (fresh, decode) if role == "prefill" else (prefill, fresh)
            for _ in clients:
                _, prompt = await legs(*pair)
                first_token(pair[0], prompt.room, 50, "stop")
        for client in clients:
            await client.done()
            assert isinstance(client.error, type(None) if comes else Unavailable)
        shown = rendered(rig.metrics)[0].decode()
        assert f'tandem_requests_without_node_total{{role="{role}"}} 3.0' in shown
        assert (f'refused_without_node_total{{role="{role}"}} 3.0' in shown) != comes
        rig.nothing_left()


async def test_a_new_request_waits_for_the_nodes_of_a_router_that_has_just_started() -> None:
    async with router_rig(
        placement_wait=300.0, configured={"prefill": ["prefill-0"], "decode": ["decode-0"]}
    ) as rig:
        client = rig.client()
        prefill, decode = await rig.pair()
        _, prompt = await legs(prefill, decode)
        first_token(prefill, prompt.room, 50, "stop")
        assert (await client.done()).finish == "stop"


async def test_nobody_waits_for_a_node_that_has_been_away_for_too_long() -> None:
    clock = Clock()
    configured = {"prefill": ["prefill-0"], "decode": ["decode-0"]}
    async with router_rig(clock, placement_wait=300.0, configured=configured) as rig:
        await rig.node("prefill", "prefill-0")
        clock.now += 60
        assert isinstance((await rig.client().done()).error, Unavailable)


async def test_a_router_stall_costs_no_attempt() -> None:
    """Every node has fenced itself and closed its sockets: nothing is placed until the nodes return."""
    async with router_rig(max_attempts=2, placement_wait=300.0) as rig:
        prefill, decode = await rig.pair(0)
        other_prefill, other_decode = await rig.pair(1)
        client = rig.client([1])
        reserve, _ = await legs(prefill, decode)
        first_token(prefill, reserve.room, 50)
        await client.until(1)
        send, sends = rig.send, []

        def no_socket(address: str, message: Any) -> bool:
            sends.append(address)
            return False

        rig.send = no_socket
        decode.say(Failed(room=reserve.room, code="node_lost", message="the router of this request is gone"))
        newcomer = rig.client([2])
        await eventually(lambda: {node.role for node in rig.registry.eligible()} == {"prefill"})
        await eventually(lambda: prefill.link_id in sends)
        assert sends.count(prefill.link_id) == 1, "the abort of the first attempt"
        trials = [sends.count(each.link_id) for each in (decode, other_decode)]
        assert all(1 <= each <= 2 for each in trials), "at most one trial per request and decode node"
        await asyncio.sleep(0.02)
        assert not client.task.done()
        assert not newcomer.task.done(), "nodes that are out of reach come back or are lost"
        rig.send = send
        other_decode.beat()
        for _ in range(2):
            reserve = await other_decode.expect(Reserve)
            chosen = prefill if reserve.prefill == prefill.ref else other_prefill
            first_token(chosen, reserve.room, 51, "length")
        await client.done()
        await newcomer.done()
        assert (client.ids, newcomer.ids) == ([50, 51], [51])
        rig.nothing_left()


async def test_attempts_are_spaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one failing pair, three attempts are not used up within a millisecond."""
    pauses: list[float] = []

    async def note(seconds: float) -> None:
        pauses.append(seconds)

    async with router_rig(max_attempts=3) as rig:
        prefill, decode = await rig.pair()
        monkeypatch.setattr(rig.dispatcher, "pause", note)
        client = rig.client()
        for _ in range(3):
            reserve, _ = await legs(prefill, decode)
            decode.say(Failed(room=reserve.room, code="transfer_failed", message="no"))
        await client.done()
        assert len(pauses) == 2
        assert 0.025 <= pauses[0] <= 0.05 <= pauses[1] * 2 <= 0.2


async def test_a_link_that_fails_marks_the_pair_and_not_its_nodes() -> None:
    """Other requests avoid the pair while both nodes serve on; after the back-off one request tries it again."""
    clock = Clock()
    async with router_rig(clock) as rig:
        prefill, decode = await rig.pair(0)
        client = rig.client()
        reserve, _ = await legs(prefill, decode)
        other = await rig.node("decode", "decode-1")
        decode.say(Failed(room=reserve.room, code="transfer_failed", message="the link is down"))
        placed: list[Any] = []

        async def serve() -> None:
            _, prompt = await legs(prefill, other) if placed else (await other.expect(Reserve), None)
            if prompt is None:
                prompt = await prefill.expect(Prefill)
            placed.append(prompt.decode)
            prefill.say(PrefillDone(room=prompt.room, stages={}))
            first_token(prefill, prompt.room, 50, "stop")

        await serve()
        await client.done()
        for _ in range(4):
            following = rig.client()
            await serve()
            await following.done()
        assert set(placed) == {other.ref.incarnation}
        shown = {each.node.name: each for each in rig.dispatcher.health.conditions(rig.registry)}
        assert (shown["prefill-0"].bad_peers, shown["decode-0"].breaker) == (["decode-0"], "closed")
        assert b'tandem_pair_bad{decode="decode-0",prefill="prefill-0"} 1.0' in rendered(rig.metrics)[0]
        clock.now += 1.0
        for node in (prefill, decode, other):
            node.beat()
        trial = rig.client()
        reserve, _ = await legs(prefill, decode)
        second = rig.client()
        await legs(prefill, other)
        third = rig.client()
        await legs(prefill, other)
        assert not [m for m in decode.received() if isinstance(m, Reserve)], "one trial at a time"
        prefill.say(PrefillDone(room=reserve.room, stages={}))
        await eventually(
            lambda: (
                rig.dispatcher.health.pairs.state((prefill.ref.incarnation, decode.ref.incarnation))
                == "closed"
            )
        )
        for waiting in (trial, second, third):
            await waiting.leave()
        rig.nothing_left()


async def test_retries_of_a_fault_that_every_pair_has_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the budget a repeatedly failing request gets 503; a first retry is always allowed."""
    monkeypatch.setattr("router.dispatch.retries.MAX_PAUSE", 0.001)
    async with router_rig(max_attempts=10, retry_ratio=0.0) as rig:
        prefill, decode = await rig.pair()
        clients = [rig.client([n + 1]) for n in range(40)]
        failed = 0
        async with asyncio.timeout(PATIENCE):
            while not all(client.task.done() for client in clients):
                for message in decode.received():
                    if isinstance(message, Reserve):
                        decode.say(Failed(room=message.room, code="transfer_failed", message="no"))
                        failed += 1
                decode.unread.clear()
                prefill.received()
                prefill.unread.clear()
                await asyncio.sleep(0.001)
        for client in clients:
            await client.done()
        refused = [client for client in clients if isinstance(client.error, Unavailable)]
        assert failed == 40 + 40 + BURST, "attempts, first retries, and what the budget allows"
        assert "the last failure: no" in str(refused[0].error)
        assert f"tandem_retries_over_budget_total {float(len(refused))}" in rendered(rig.metrics)[0].decode()
        rig.nothing_left()


async def test_the_death_of_a_node_moves_all_its_requests() -> None:
    """However many there are, the retry budget does not bound them, and none waits for a trial."""
    async with router_rig(max_requests=300, retry_ratio=0.0) as rig:
        prefill, decode = await rig.pair()
        clients = [rig.client([n + 1]) for n in range(300)]
        known = rig.registry.get(decode.ref.incarnation)
        assert known is not None
        await eventually(lambda: len(known.rooms) == 300)
        other = await rig.node("decode", "decode-1")
        rig.registry.lose(known, "its socket closed", "closed")
        for _ in range(300):
            reserve = await other.expect(Reserve)
            first_token(prefill, reserve.room, 50, "stop")
        for client in clients:
            assert (await client.done()).finish == "stop", client.error
        assert rig.dispatcher.poison.suspects.empty, "they have completed"
        rig.nothing_left()


async def test_longer_than_the_shortest_node_allows() -> None:
    async with router_rig() as rig:
        await rig.node("prefill", "prefill-0", max_model_len=100)
        await rig.node("decode", "decode-0", max_model_len=20)
        client = await rig.client([1] * 15, max_tokens=6).done()
        assert isinstance(client.error, InvalidRequest)
        assert client.error.param == "max_tokens"
        assert "21 tokens" in str(client.error)
        assert "at most 20" in str(client.error)
        rig.nothing_left()


async def test_a_prompt_may_fill_the_context_if_its_only_token_is_not_computed_with() -> None:
    async with router_rig() as rig:
        prefill = await rig.node("prefill", "prefill-0", max_model_len=100)
        decode = await rig.node("decode", "decode-0", max_model_len=20)
        client = rig.client([1] * 20, max_tokens=1)
        reserve, _ = await legs(prefill, decode)
        first_token(prefill, reserve.room, 50, "length")
        assert (await client.done()).finish == "length"
        assert isinstance((await rig.client([1] * 21, max_tokens=1).done()).error, InvalidRequest)
        rig.nothing_left()


async def test_a_draining_node_gets_nothing_new_and_finishes() -> None:
    async with router_rig() as rig:
        prefill, decode = await rig.pair(0)
        client = rig.client()
        reserve, _ = await legs(prefill, decode)
        decode.beat("draining")
        await decode.echo()
        assert isinstance((await rig.client().done()).error, Unavailable)
        first_token(prefill, reserve.room, 50)
        decode.tokens(reserve.room, 1, [51], "stop")
        await client.done()
        assert client.ids == [50, 51]


async def test_a_node_that_cannot_be_reached_while_placing() -> None:
    """Its socket is closed and nobody has noticed yet: the request goes elsewhere."""
    async with router_rig() as rig:
        prefill, decode = await rig.pair(0)
        spare = await rig.node("decode", "decode-1")
        send = rig.send
        rig.send = lambda peer, message: peer != decode.link_id and send(peer, message)
        client = rig.client()
        prompt = await prefill.expect(Prefill)
        assert prompt.decode == spare.ref.incarnation
        first_token(prefill, prompt.room, 50, "stop")
        await client.done()
        assert client.finish == "stop"
        rig.nothing_left()


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_client_that_leaves_while_a_node_cannot_be_reached(role: Role) -> None:
    """Only a node that has been sent its half gets an abort."""
    async with router_rig() as rig:
        prefill, decode = await rig.pair()
        unreached = prefill if role == "prefill" else decode
        sends: list[tuple[str, type]] = []

        def send(peer: str, message: Any) -> bool:
            sends.append((peer, type(message)))
            if peer == unreached.link_id:
                client.task.cancel()
            return peer != unreached.link_id

        rig.send = send
        client = rig.client()
        await client.done()
        await asyncio.sleep(0.01)
        begun = [(decode.link_id, Reserve), (prefill.link_id, Prefill), (decode.link_id, Abort)]
        assert sends == (begun if role == "prefill" else begun[:1])
        rig.nothing_left()


@pytest.mark.parametrize("bound", ["placement_wait", "request_timeout"])
async def test_an_unreachable_pair_is_not_tried_for_ever(bound: str) -> None:
    """Its heartbeats arrive, so it is chosen again and again."""
    limits: dict[str, Any] = {"placement_wait": 300.0, "request_timeout": 600.0, bound: 0.2}
    async with router_rig(**limits) as rig:
        prefill, _ = await rig.pair()
        send = rig.send
        rig.send = lambda peer, message: peer != prefill.link_id and send(peer, message)
        client = rig.client()
        async with asyncio.timeout(PATIENCE):
            while not client.task.done():
                prefill.beat()
                await asyncio.sleep(0.01)
        error = client.error
        assert isinstance(error, Unavailable if bound == "placement_wait" else Unavailable | DeadlineExceeded)
        rig.nothing_left()


async def test_after_shutdown_nothing_begins() -> None:
    """This includes a request whose text was being processed: it must not wait for room either."""
    async with router_rig(max_requests=2) as rig:
        rig.dispatcher.end_all(Unavailable("the router is going away"))
        client = await rig.client().done()
        assert str(client.error) == "the router is going away"
        assert rig.dispatcher.timelines.get("r1") is None


async def test_many_at_once_with_nodes_that_come_and_go() -> None:
    """Every client gets its own text once, although decode nodes leave in the middle of it."""

    async def serve_prefill(node: FakeNode) -> None:
        while True:
            prompt = await node.expect(Prefill, timeout=60)
            done = len(prompt.token_ids)
            await asyncio.sleep(0)
            last = prompt.emitted + 1 == prompt.sampling.max_tokens  # all but one arrived before a node left
            first_token(node, prompt.room, prompt.token_ids[0] * 1000 + done, "length" if last else None)

    async def serve_decode(node: FakeNode) -> None:
        while True:
            reserve = await node.expect(Reserve, timeout=60)
            start, most = len(reserve.token_ids), reserve.sampling.max_tokens - reserve.emitted
            for offset in range(1, most):
                token = reserve.token_ids[0] * 1000 + start + offset
                node.tokens(reserve.room, offset, [token], "length" if offset == most - 1 else None)
                await asyncio.sleep(0)

    async with router_rig(max_attempts=10, placement_wait=300.0) as rig:
        prefill = await rig.node("prefill", "prefill-0")
        tasks = [asyncio.ensure_future(serve_prefill(prefill))]
        decodes = []
        for n in range(3):
            decodes.append(await rig.node("decode", f"decode-{n}"))
            tasks.append(asyncio.ensure_future(serve_decode(decodes[n])))
        clients = [rig.client([n + 1], max_tokens=12) for n in range(40)]
        await asyncio.sleep(0.02)
        for n, node in enumerate(decodes[:2]):
            node.say(Goodbye(incarnation=node.ref.incarnation))
            tasks[n + 1].cancel()
            await asyncio.sleep(0.02)
        for n, client in enumerate(clients):
            await client.done()
            assert client.error is None
            assert client.ids == [(n + 1) * 1000 + i for i in range(1, 13)]
        rig.nothing_left()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def rooms_of(rig: RouterRig, node: FakeNode) -> dict[int, int]:
    known = rig.registry.get(node.ref.incarnation)
    assert known is not None
    return {room: known.rooms.left(room) for room in known.rooms}


async def test_what_placement_sees_of_a_request() -> None:
    """Prompt tokens count until they are computed, the request until its part on the node is over."""
    async with router_rig() as rig:
        prefill, decode = await rig.pair()
        client = rig.client([1, 2, 3])
        reserve, _ = await legs(prefill, decode)
        room = reserve.room
        assert (rooms_of(rig, prefill), rooms_of(rig, decode)) == ({room: 3}, {room: 0})
        first_token(prefill, room, 50)
        await client.until(1)
        assert rooms_of(rig, prefill) == {room: 0}
        prefill.say(PrefillDone(room=room, stages={}))
        await eventually(lambda: not rooms_of(rig, prefill))
        assert rooms_of(rig, decode) == {room: 0}
        await client.leave()
        rig.nothing_left()


async def test_another_try_counts_its_text_and_waits_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a prompt that a node gave back keeps its place in the queues (test_draining_decode.py)."""
    async with router_rig() as rig:
        prefill, decode = await rig.pair()
        lengths: list[int] = []
        monkeypatch.setattr(
            rig.dispatcher.feedback, "transferred", lambda attempt, stages, tokens: lengths.append(tokens)
        )
        client = rig.client([1, 2, 3])
        reserve, _ = await legs(prefill, decode)
        prefill.say(PrefillDone(room=reserve.room, stages={}))
        first_token(prefill, reserve.room, 50)
        decode.tokens(reserve.room, 1, [51])
        await client.until(2)
        await asyncio.sleep(0.01)
        decode.say(Failed(room=reserve.room, code="preempted", message="no pages"))
        again, prompt = await legs(prefill, decode)
        assert (again.waited_ms, prompt.waited_ms) == (0, 0)
        prefill.say(PrefillDone(room=again.room, stages={}))
        await eventually(lambda: len(lengths) == 2)
        assert lengths == [3, 5]
        await client.leave()


async def test_a_message_that_cannot_be_encoded_ends_its_request() -> None:
    async with router_rig() as rig:
        await rig.pair()

        def broken(peer: str, message: object) -> bool:
            raise OverflowError("a number does not fit")

        rig.send = broken
        client = rig.client()
        await client.done()
        assert isinstance(client.error, OverflowError)
        rig.nothing_left()


async def test_prefill_lost_after_its_leg_was_over_changes_nothing() -> None:
    async with router_rig() as rig:
        prefill, decode = await rig.pair()
        client = rig.client()
        reserve, _ = await legs(prefill, decode)
        first_token(prefill, reserve.room, 50)
        prefill.say(PrefillDone(room=reserve.room, stages={}), Goodbye(incarnation=prefill.ref.incarnation))
        await eventually(lambda: not rig.registry.count("prefill"))
        decode.tokens(reserve.room, 1, [51], "stop")
        await client.done()
        assert (client.ids, client.error) == ([50, 51], None)


def test_node_lost_is_retryable() -> None:
    assert NodeLost("x").retryable
