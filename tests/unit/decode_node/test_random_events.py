"""Requests on real nodes while routers, nodes and messages do what they may at any time, in any order.

Checked at every step: tokens are those of plain decoding, a request is in one queue of a node, and page tables agree.
Checked at the end, when nothing disturbs any more: every request has ended once, and no node holds anything.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from common.errors import DeadlineExceeded, InvalidRequest
from common.messages.node_inbox import Abort, FlushCache, PeerDraining, PeerLost
from common.node.completion import Deferred, Immediate
from kv_transfer.limits import TransferLimits
from tests.fakes.late_host import late_lanes
from tests.fakes.loopback import Damage, Fault
from tests.fakes.node_cluster import Call, DecodeSide, HostShape, NodeCluster, PrefillSide, Shape, Watched
from tests.fakes.scenarios import SAMPLED, prompt_of
from tests.fakes.tiny_model import reference

TRANSFER = TransferLimits(record_bytes=8192, slots_timeout=3.0, first_page_timeout=3.0, stall_timeout=1.0)
DAMAGES: list[Damage] = ["none", "none", "drop", "fail", "truncate", "corrupt", "duplicate", "stick"]
INDEX = st.integers(0, 63)  # of a node or request, modulo how many there are
SOON, NEVER = 0.05, 1e6  # deadlines in seconds
MOST_NODES = 4  # of one role, the killed ones included
HOST = HostShape(blocks=24, lanes=late_lanes)


class Requests(RuleBasedStateMachine):
    @initialize(
        page_size=st.sampled_from([1, 4]),
        chunk=st.sampled_from([5, 16]),
        prefill_pool=st.sampled_from([64, 256]),
        decode_pool=st.sampled_from([80, 256]),
        running=st.sampled_from([1, 4]),
        backup=st.sampled_from([0, 1 << 20]),
        completion=st.sampled_from([Immediate, Deferred, Watched]),
        fencing=st.booleans(),
        later=st.booleans(),
        host=st.booleans(),
    )
    def start(
        self,
        page_size: int,
        chunk: int,
        prefill_pool: int,
        decode_pool: int,
        running: int,
        backup: int,
        completion: type[Immediate],
        fencing: bool,
        later: bool,
        host: bool,
    ) -> None:
        self.shape = Shape(
            routers=2,
            prefills=2,
            decodes=2,
            page_size=page_size,
            chunk_tokens=chunk,
            prefill_pool=prefill_pool,
            decode_pool=decode_pool,
            max_running=running,
            max_transferring=3,
            reserved_tokens=4,
            backup_bytes=backup,
            completion=completion,
            fencing=fencing,
            checks_later=later,
            host=HOST if host else None,
            decode_host=HOST if host else None,
            transfer=TRANSFER,
        )
        self.cluster = NodeCluster(self.shape)
        self.repeated: set[int] = set()  # calls of which a message came twice, by `id`
        self.dead: list[PrefillSide | DecodeSide] = []  # killed nodes that routers have not lost yet

    def sides(self) -> list[PrefillSide | DecodeSide]:
        sides: list[PrefillSide | DecodeSide] = [*self.cluster.prefills, *self.cluster.decodes]
        return [side for side in sides if side.alive]

    def pick(self, index: int) -> PrefillSide | DecodeSide:
        return self.sides()[index % len(self.sides())]

    def open_calls(self) -> list[Call]:
        return [call for call in self.cluster.calls if not call.over]

    # ---- what clients do

    @rule(
        length=st.integers(1, 40),
        most=st.integers(1, 30),
        pair=INDEX,
        deadline=st.sampled_from([SOON, *[NEVER] * 5]),
        legs=st.sampled_from(["dp", "pd", "dp", "pd", "d", "p"]),
        router=st.integers(0, 1),
        sampled=st.booleans(),
        turns=st.integers(0, 20),
    )
    def submit(
        self,
        length: int,
        most: int,
        pair: int,
        deadline: float,
        legs: str,
        router: int,
        sampled: bool,
        turns: int,
    ) -> None:
        """Submit a request and let it get somewhere: random single turns seldom do."""
        if len(self.open_calls()) < 6:
            prefills = [i for i, side in enumerate(self.cluster.prefills) if side.alive]
            decodes = [i for i, side in enumerate(self.cluster.decodes) if side.alive]
            where = prefills[pair % len(prefills)], decodes[pair // 2 % len(decodes)]
            chosen = {"seed": length, **SAMPLED} if sampled else {}
            prompt = prompt_of(24)[: length // 2] + prompt_of(length - length // 2, length % 3)
            self.cluster.submit(prompt, most, *where, deadline, legs, router=router, **chosen)
        self.cluster.turn(turns)

    @rule(index=INDEX, turns=st.integers(0, 5))
    def client_leaves(self, index: int, turns: int) -> None:
        if calls := self.open_calls():
            self.cluster.abort(calls[index % len(calls)])
        self.cluster.turn(turns)

    # ---- what nodes, links and time do

    @rule(count=st.integers(1, 12))
    def turns(self, count: int) -> None:
        self.cluster.turn(count)

    @rule(count=st.integers(1, 6), index=INDEX)
    def turns_of_one_node(self, count: int, index: int) -> None:
        for _ in range(count):
            self.cluster.turn_one(self.pick(index))

    @rule(seconds=st.sampled_from([0.1, 1.0, 4.0]))
    def time_passes(self, seconds: float) -> None:
        self.cluster.clock.now += seconds
        self.cluster.fabric.advance()

    @rule(damage=st.sampled_from(DAMAGES), delay=st.sampled_from([0.0, 0.003, 0.02, 5.0]))
    def writes_are_disturbed(self, damage: Damage, delay: float) -> None:
        """One in three, from now on."""
        self.cluster.fabric.plan = lambda n: Fault(delay, damage) if n % 3 == 0 else Fault()

    # ---- mishaps, of which one rule makes one: with a rule for each there would be little else

    @rule(
        what=st.sampled_from(
            [
                "a_leg_comes_late_or_twice",
                "an_abort_reaches_one_node",
                "all_routers_lose",
                "one_router_loses",
                "a_node_loses_a_router",
                "a_decode_node_is_said_to_drain",
                "flush",
                "a_node_dies_and_returns",
                "routers_notice_the_dead",
            ]
        ),
        index=INDEX,
        either=st.booleans(),
    )
    def mishap(self, what: str, index: int, either: bool) -> None:
        getattr(self, what)(index, either)

    def a_leg_comes_late_or_twice(self, index: int, either: bool) -> None:
        if self.cluster.calls:
            call = self.cluster.calls[-1 - index % min(4, len(self.cluster.calls))]
            self.repeated.add(id(call))
            self.cluster.send_leg(call, "d" if either else "p")

    def an_abort_reaches_one_node(self, index: int, either: bool) -> None:
        """The other one learns of the end from its peer or by a timeout, or completes the request for nobody."""
        if calls := self.open_calls():
            call = calls[index % len(calls)]
            call.aborted = True
            del self.cluster.by_room[call.room]
            side = call.prefill if either else call.decode
            side.links[call.router].deliver(Abort(room=call.room, reason="client left"))

    def all_routers_lose(self, index: int, either: bool) -> None:
        self.cluster.lose(self.pick(index))

    def one_router_loses(self, index: int, either: bool) -> None:
        side = self.pick(index)
        for other in self.sides():
            if other.ref.role != side.ref.role:
                other.links[either].deliver(PeerLost(incarnation=side.ref.incarnation))

    def a_node_loses_a_router(self, index: int, either: bool) -> None:
        self.pick(index).links[either].router_lost = True

    def a_decode_node_is_said_to_drain(self, index: int, either: bool) -> None:
        decodes = [side for side in self.cluster.decodes if side.alive]
        incarnation = decodes[index % len(decodes)].ref.incarnation
        for side in self.cluster.prefills:
            if side.alive:
                side.links[either].deliver(PeerDraining(incarnation=incarnation))

    def flush(self, index: int, either: bool) -> None:
        self.pick(index).link.deliver(FlushCache())

    def a_node_dies_and_returns(self, index: int, either: bool) -> None:
        side = self.pick(index)
        same = self.cluster.prefills if isinstance(side, PrefillSide) else self.cluster.decodes
        if len(same) < MOST_NODES:
            self.cluster.kill(side)
            self.cluster.restart(side)
            self.dead.append(side)

    def routers_notice_the_dead(self, index: int = 0, either: bool = False) -> None:
        for side in self.dead:
            self.cluster.lose(side)
        self.dead.clear()

    # ---- what holds

    @invariant()
    def tokens_are_right_and_requests_in_one_place(self) -> None:
        if not hasattr(self, "cluster"):
            return
        for call in self.cluster.calls:
            assert call.ids == reference(tuple(call.prompt), call.sampling)[0][: len(call.ids)]
        for side in self.sides():
            side.space.check_integrity()
            rooms = Counter(request.room for request in side.node.queues)
            assert not rooms or max(rooms.values()) == 1, rooms

    def teardown(self) -> None:
        """Nothing disturbs any more: everything ends by itself."""
        if not hasattr(self, "cluster"):
            return
        with self.cluster as cluster:
            cluster.fabric.plan = lambda n: Fault()
            cluster.fabric.unstick()
            self.routers_notice_the_dead()
            # A node's first launch may take 60 s, in which no other node counts it as stalled.
            cluster.run(limit=6000, dt=0.05)
            for call in cluster.calls:
                self.check(call)
            for _ in range(40):  # records of ended rooms expire, and rooms of repeated prompts
                cluster.turn(10)
                cluster.clock.now += 5.0
            cluster.settle(limit=2000)

    def check(self, call: Call) -> None:
        if call.error is not None:
            refused = call.error.code == InvalidRequest.code and id(call) in self.repeated
            assert refused or call.error.code in (DeadlineExceeded.code, "client_gone"), call.error
        elif not call.aborted:
            assert (call.ids, call.finish) == reference(tuple(call.prompt), call.sampling)


EXAMPLES = 100 if "TANDEM_EXPLORE" in os.environ else 12
Requests.TestCase.settings = settings(max_examples=EXAMPLES, stateful_step_count=40, deadline=None)
TestRequests = pytest.mark.timeout(600)(Requests.TestCase)  # shrinking a failure takes minutes
