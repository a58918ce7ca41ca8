"""A request that crashes its nodes among others that do not, in a fleet of fake nodes that are restarted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from common.errors import PoisonRequest
from common.messages.decode_inbox import Reserve
from common.messages.generation import OutputToken, SamplingParams
from common.messages.identity import Role
from common.messages.node_inbox import Abort
from common.messages.prefill_inbox import Prefill
from common.messages.router_inbox import FirstToken, PrefillDone
from router.dispatch.attempt import Attempt
from router.dispatch.generation import AnswerComplete, GenerationRequest
from router.dispatch.in_flight import InFlight
from router.dispatch.poison_watch import PoisonWatch
from router.dispatch.suspects import fingerprint
from router.metrics.timeline import Timeline
from router.nodes.registry import Node
from tests.fakes.clock import Clock
from tests.fakes.fake_node import FakeNode
from tests.fakes.router_rig import RouterRig, legs, router_rig
from tests.fakes.served_series import rendered
from tests.fakes.waiting import PATIENCE, eventually
from tests.unit.router.nodes.test_registry import register

POISON = 0  # a token id that occurs only in the poison request
LENGTH = 12


@dataclass
class Fleet:
    """Nodes that compute prompt[0] * 1000 + position; nodes of role `weak` die of prompts that begin with POISON."""

    rig: RouterRig
    weak: Role
    crashes: int = 0
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def start(self, role: Role, name: str) -> None:
        self.tasks.append(asyncio.get_running_loop().create_task(self._run(role, name)))

    async def stop(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    async def _run(self, role: Role, name: str) -> None:
        while True:  # one incarnation after the other
            node = await self.rig.node(role, name)
            await (self._prefill(node) if role == "prefill" else self._decode(node))
            self.crashes += 1
            self.rig.nodes.remove(node)
            node.close()
            # A real process takes far longer to start than its death takes to be noticed.
            await eventually(lambda gone=node.ref.incarnation: self.rig.registry.get(gone) is None)  # type: ignore[misc]

    async def _work(
        self, node: FakeNode, kind: type[Prefill] | type[Reserve]
    ) -> list[Prefill | Reserve] | None:
        """Return the received messages; None if one is poison, and the node dies before it answers anything."""
        first: Any = await node.expect(kind)
        await asyncio.sleep(0.005)
        # Read once: more may arrive at any time, and what is cleared unseen would never be answered.
        arrived = node.received()
        node.unread.clear()
        rest: list[Any] = [message for message in arrived if isinstance(message, kind)]
        aborted = {message.room for message in arrived if isinstance(message, Abort)}
        work: list[Any] = [message for message in (first, *rest) if message.room not in aborted]
        poisoned = any(message.token_ids[0] == POISON for message in work)
        return None if poisoned and self.weak == node.ref.role else work

    async def _prefill(self, node: FakeNode) -> None:
        while (work := await self._work(node, Prefill)) is not None:
            for prompt in work:
                token = prompt.token_ids[0] * 1000 + len(prompt.token_ids)
                last = prompt.emitted + 1 == LENGTH
                node.say(
                    FirstToken(
                        room=prompt.room,
                        token=OutputToken(token),
                        finish_reason="length" if last else None,
                        cached_tokens=0,
                    ),
                    PrefillDone(room=prompt.room, stages={}),
                )

    async def _decode(self, node: FakeNode) -> None:
        while (work := await self._work(node, Reserve)) is not None:
            for offset in range(1, LENGTH):
                for reserve in work:
                    position = reserve.emitted + offset
                    if position < LENGTH:
                        token = reserve.token_ids[0] * 1000 + len(reserve.token_ids) + offset
                        end = "length" if position == LENGTH - 1 else None
                        node.tokens(reserve.room, offset, [token], end)
                await asyncio.sleep(0)


@asynccontextmanager
async def fleet_of(weak: Role) -> AsyncGenerator[Fleet, None]:
    names = [
        ("prefill", "prefill-0"),
        ("prefill", "prefill-1"),
        ("decode", "decode-0"),
        ("decode", "decode-1"),
    ]
    configured = {role: [name for of, name in names if of == role] for role, _ in names}
    async with router_rig(placement_wait=300.0, configured=configured) as rig:
        fleet = Fleet(rig, weak)
        for role, name in names:
            fleet.start(role, name)  # type: ignore[arg-type]
        await eventually(lambda: len(rig.registry.eligible()) == 4)
        try:
            yield fleet
        finally:
            await fleet.stop()


@pytest.mark.parametrize("weak", ["prefill", "decode"])
@pytest.mark.parametrize("others", [0, 49])
async def test_only_the_poison_ends_with_an_error(weak: Role, others: int) -> None:
    """Two crashes if the poison is the only suspect, otherwise together, together, in a group, and isolated."""
    async with fleet_of(weak) as fleet:
        rig = fleet.rig
        innocent = [rig.client([n + 1], max_tokens=LENGTH) for n in range(others // 2)]
        poison = rig.client([POISON], max_tokens=LENGTH)
        innocent += [rig.client([n + 1], max_tokens=LENGTH) for n in range(others // 2, others)]
        await poison.done()
        assert isinstance(poison.error, PoisonRequest)
        assert "this request has crashed nodes" in str(poison.error)
        for n, client in enumerate(innocent):
            await client.done()
            assert client.error is None
            assert client.ids == [(n + 1) * 1000 + i for i in range(1, LENGTH + 1)]
        assert fleet.crashes == 2 if not others else 2 <= fleet.crashes <= 4
        crashes = fleet.crashes
        # The client sends it again with another seed: it is refused and no node crashes.
        again = await rig.client([POISON], max_tokens=LENGTH, seed=99).done()
        assert isinstance(again.error, PoisonRequest)
        assert (await rig.client([5], max_tokens=LENGTH).done()).error is None
        assert fleet.crashes == crashes
        assert b"tandem_requests_quarantined_total 1.0" in rendered(rig.metrics)[0]
        rig.nothing_left()


@pytest.mark.parametrize("copies", [2, 6])
async def test_copies_of_a_poison_cost_no_further_crashes(copies: int) -> None:
    """The verdict on one copy applies to those that wait or are between two nodes."""
    async with fleet_of("prefill") as fleet:
        poison = [fleet.rig.client([POISON], max_tokens=LENGTH) for _ in range(copies)]
        for client in poison:
            await client.done()
            assert isinstance(client.error, PoisonRequest)
        # Both nodes may have had copies at the first crash, and again at the second.
        assert fleet.crashes <= 4
        fleet.rig.nothing_left()


async def test_a_request_that_is_convicted_while_it_waits_for_a_node_is_not_run() -> None:
    configured = {"prefill": ["prefill-0", "prefill-1"]}
    async with router_rig(placement_wait=300.0, configured=configured) as rig:
        gone, decode = await rig.pair()
        poison = rig.client([POISON])
        reserve, _ = await legs(gone, decode)
        rig.registry.lose(rig.registry.node(gone.ref.incarnation), "its socket closed", "closed")
        assert (await decode.expect(Abort)).room == reserve.room
        # Another copy arrives while the first waits for a prefill node, and waits as well.
        copy = rig.client([POISON])
        await eventually(lambda: rig.dispatcher.active == 2)
        key = fingerprint(GenerationRequest("r1", [POISON], SamplingParams(max_tokens=10, temperature=0.0)))
        rig.dispatcher.poison.suspects.crashed("another", "prefill", {key: 0})
        assert rig.dispatcher.poison.suspects.is_quarantined(key)
        await rig.node("prefill", "prefill-1")
        for client in (poison, copy):
            await client.done()
            assert isinstance(client.error, PoisonRequest)
        rig.nothing_left()


async def test_a_suspect_is_cleared_by_an_answer_that_a_stop_string_ends() -> None:
    """As by one that ends on its node: otherwise its copies run in isolation until the suspicion expires."""
    async with router_rig() as rig:
        prefill, decode = await rig.pair()
        suspects = rig.dispatcher.poison.suspects
        asked = GenerationRequest("r1", [POISON], SamplingParams(max_tokens=10, temperature=0.0))
        suspects.crashed("gone", "decode", {fingerprint(asked): 5})
        deltas = rig.dispatcher.generate(asked)
        first = asyncio.ensure_future(anext(deltas))
        _, prompt = await legs(prefill, decode)
        prefill.say(FirstToken(room=prompt.room, token=OutputToken(7), finish_reason=None, cached_tokens=0))
        await first
        assert suspects.is_suspect(fingerprint(asked))
        with pytest.raises(StopAsyncIteration):
            await deltas.athrow(AnswerComplete())
        assert suspects.empty
        rig.nothing_left()


async def test_nodes_that_lose_their_connection_convict_nobody() -> None:
    """A stall of the router closes every socket; the same processes return."""
    async with router_rig(placement_wait=300.0, max_attempts=9) as rig:
        nodes = await rig.pair()
        client = rig.client([1])
        for _ in range(4):
            await eventually(lambda: [node for node in rig.registry if node.rooms])
            for node in list(rig.registry):
                rig.registry.lose(node, "its socket closed", "closed")
            for fake in nodes:
                await fake.register()
            assert rig.dispatcher.poison.suspects.empty
        await client.leave()
        assert client.error is None
        rig.nothing_left()


async def test_many_requests_that_lose_two_nodes_in_a_row_all_run_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All of them are suspected of two crashes; none waits until every other one has had a trial of its own."""
    monkeypatch.setattr("router.dispatch.isolation.TRIAL_SECONDS", 0.01)
    requests = 300
    async with router_rig(max_requests=requests, placement_wait=PATIENCE, retry_ratio=0.0) as rig:
        _, decode = await rig.pair(0)
        clients = [rig.client([n + 1]) for n in range(requests)]
        for number in range(3):
            known = rig.registry.node(decode.ref.incarnation)
            await eventually(lambda known=known: len(known.rooms) == requests)  # type: ignore[misc]
            if number < 2:
                decode = await rig.node("decode", f"decode-{number + 1}")
                rig.registry.lose(known, "its socket closed", "closed")
        assert not [client.error for client in clients if client.error is not None]
        for client in clients:
            await client.leave()
        rig.nothing_left()


async def test_a_suspect_waits_for_its_trial_no_longer_than_for_a_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The trial of another suspect never ends."""
    monkeypatch.setattr("router.dispatch.isolation.TRIAL_SECONDS", 3600.0)
    async with router_rig(placement_wait=0.2) as rig:
        _, decode = await rig.pair(0)
        clients = [rig.client([n + 1]) for n in range(2)]
        for number in range(3):
            known = rig.registry.node(decode.ref.incarnation)
            await eventually(lambda known=known: len(known.rooms) == 2)  # type: ignore[misc]
            if number < 2:
                decode = await rig.node("decode", f"decode-{number + 1}")
                rig.registry.lose(known, "its socket closed", "closed")
        for client in clients:
            assert client.error is None
            await client.leave()
        rig.nothing_left()


@pytest.mark.parametrize("transferred", [False, True])
@pytest.mark.parametrize("order", [("prefill", "decode"), ("decode", "prefill")])
def test_both_halves_of_a_movable_node_die_in_one_crash(order: tuple[Role, Role], transferred: bool) -> None:
    """A request that they shared was computed by one of them, and that one counts."""
    watch = PoisonWatch(Clock(), 2)
    request = GenerationRequest("r1", [POISON], SamplingParams(max_tokens=10))
    flight = InFlight(request, Timeline("r1", 0.0), 60.0)
    convicted = []
    for crash in range(2):
        halves = {role: Node(register(role, "flex-0", f"{role}-{crash}"), 0.0) for role in order}
        attempt = Attempt(crash, halves["prefill"], halves["decode"], transferred=transferred)
        convicted += [bool(watch.crashed(halves[role], [(attempt, flight)])) for role in order]
    assert sum(convicted) == 1
    assert any(convicted[2:]), "two crashes, as on any other node"
