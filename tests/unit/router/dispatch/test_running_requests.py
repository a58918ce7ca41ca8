"""Aborting requests in flight by id, at each stage of a request."""

from __future__ import annotations

import asyncio

import pytest

from common.messages.generation import SamplingParams
from common.messages.node_inbox import Abort
from common.messages.prefill_inbox import Prefill
from router.dispatch.generation import GenerationRequest
from router.dispatch.in_flight import InFlight
from router.dispatch.running_requests import RunningRequests
from router.metrics.timeline import Timeline
from tests.fakes.router_rig import RouterRig, legs, router_rig
from tests.fakes.waiting import eventually
from tests.unit.router.dispatch.test_dispatcher import first_token


def abort(rig: RouterRig) -> None:
    assert rig.dispatcher.running.abort("", ["r1"]) == 1


def outcome(rig: RouterRig) -> str:
    report = rig.dispatcher.timelines.get("r1")
    assert report is not None
    return str(report["outcome"])


async def test_an_aborted_answer_keeps_its_tokens_and_frees_both_nodes() -> None:
    async with router_rig() as rig:
        prefill, decode = await rig.pair()
        client = rig.client()
        reserve, _ = await legs(prefill, decode)
        first_token(prefill, reserve.room, 50)
        await client.until(1)
        abort(rig)
        await client.done()
        assert (client.error, client.finish, client.ids) == (None, "abort", [50])
        assert (await prefill.expect(Abort)).room == reserve.room
        assert (await decode.expect(Abort)).room == reserve.room
        assert outcome(rig) == "abort"
        assert rig.dispatcher.running.count("") == 0
        rig.nothing_left()


async def test_a_request_that_waits_for_a_node_is_aborted() -> None:
    configured = {"prefill": ["prefill-0"], "decode": ["decode-0"]}
    async with router_rig(placement_wait=300.0, return_window=300.0, configured=configured) as rig:
        client = rig.client()
        await eventually(lambda: rig.dispatcher.running.count("") == 1)
        await asyncio.sleep(0)
        abort(rig)
        await client.done()
        assert (client.error, client.finish, client.ids) == (None, "abort", [])
        rig.nothing_left()


async def test_a_request_whose_node_was_just_lost_is_not_placed_again() -> None:
    async with router_rig(placement_wait=300.0) as rig:
        prefill, _ = await rig.pair()
        await rig.node("decode", "decode-1")
        client = rig.client()
        attempt = rig.dispatcher.attempt((await prefill.expect(Prefill)).room)
        assert attempt is not None
        attempt.lose(attempt.decode, "its socket closed")
        abort(rig)
        await client.done()
        assert (client.error, client.finish) == (None, "abort")
        rig.nothing_left()


async def test_a_client_that_leaves_at_the_same_moment_is_gone() -> None:
    configured = {"prefill": ["prefill-0"], "decode": ["decode-0"]}
    async with router_rig(placement_wait=300.0, return_window=300.0, configured=configured) as rig:
        client = rig.client()
        await eventually(lambda: rig.dispatcher.running.count("") == 1)
        abort(rig)
        await client.leave()
        assert client.task.cancelled()
        assert outcome(rig) == "client gone"
        rig.nothing_left()


def flight(identity: str, client: str, *known_as: str) -> InFlight:
    request = GenerationRequest(identity, [1], SamplingParams(max_tokens=1), client=client, known_as=known_as)
    return InFlight(request, Timeline(identity, 0.0, client), 0.0)


@pytest.mark.parametrize(
    ("identities", "aborted"),
    [
        (["a"], ["a", "a-1", "a-2"]),
        (["a-1"], ["a-1"]),
        (["b-7"], ["b-7"]),
        (["b"], []),
        (["c", "a-2"], ["a-2"]),
    ],
)
def test_ids(identities: list[str], aborted: list[str]) -> None:
    """All prompts of a request end with it; others, such as those of other clients, are never reached."""
    running = RunningRequests()
    mine = [flight(name, "me", *known) for name, *known in (("a",), ("a-1", "a"), ("a-2", "a"), ("b-7",))]
    others = [flight(name, "you") for name in ("a", "b", "c")]
    for each in (*mine, *others):
        running.add(each)
    assert running.abort("me", identities) == len(aborted)
    assert [each.request.request_id for each in mine if each.aborted] == aborted
    assert not any(each.aborted for each in others)
    assert (running.count("me"), running.count("nobody")) == (4, 0)
    assert running.abort_all() == 7
    for each in (*mine, *others):
        running.remove(each)
    assert running.count("me") == 0
