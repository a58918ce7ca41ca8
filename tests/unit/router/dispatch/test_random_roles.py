"""The router while nodes also change their roles and compute short prompts themselves, in any order.

The rest is that of `test_random_lifecycles`, with placement by predicted times, sessions, priorities, and limits beyond
which nodes are busy.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from common.messages.generation import SamplingParams
from common.messages.identity import ROLES, Role
from router.dispatch.generation import GenerationRequest, PromptBatch
from router.dispatch.limits import DispatchLimits
from router.dispatch.shared_prompt import shares
from router.nodes.placement import PlacementPolicy, decode_cost, make_policy, prefill_cost
from tests.fakes.placement_rules import DEFAULT_RULES
from tests.fakes.scripted_cluster import PAGE, AskedPrompt, ScriptedCluster, SteppedNode
from tests.fakes.stepped_loop import SteppedLoop
from tests.unit.router.dispatch.test_random_lifecycles import INDEX, MAX_OPEN, Lifecycles, Reader

MOVABLE = ("flex-0", "flex-1")
STEM = [7] * (2 * PAGE)  # of prompts that share a prefix
TIMES = ((64, 40.0), (8192, 4000.0))


class Roles(Lifecycles):
    @initialize(
        policy=st.sampled_from(["cache_aware", "cache_aware", "power_of_two", "round_robin"]),
        local=st.sampled_from([0, 20, 1000]),
        busy=st.booleans(),
        pages=st.sampled_from([2, 100]),
        crashes=st.sampled_from([0, 2]),
        hold=st.sampled_from([0.0, 0.05]),
        prefills=st.integers(0, 1),
        decodes=st.integers(0, 1),
    )
    def start(
        self,
        policy: str,
        local: int,
        busy: bool,
        pages: int,
        crashes: int,
        hold: float,
        prefills: int,
        decodes: int,
    ) -> None:
        limits = DispatchLimits(
            max_attempts=3,
            max_requests=8,
            request_timeout=30.0,
            placement_wait=4.0,
            retry_ratio=1.0,
            queue_wait=6.0,
            max_crashes=crashes,
            reserved_tokens=16,
            first_token_hold=hold,
            requests_per_node=1 << 20,
        )
        self.most = limits.max_requests
        policies: dict[Role, PlacementPolicy] = {
            "prefill": make_policy(policy, prefill_cost),
            "decode": make_policy(policy, decode_cost),
        }
        rules = replace(
            DEFAULT_RULES,
            local_tokens=local,
            block_tokens=PAGE,
            busy_first_token_ms=500.0 if busy else None,
            busy_pool_share=0.8 if busy else None,
        )
        self.loop = SteppedLoop()
        self.cluster = ScriptedCluster(self.loop, limits, policies, pages, rules, MOVABLE, TIMES)
        self.readers: list[Reader] = []
        for role, count in (("prefill", prefills), ("decode", decodes)):
            for number in range(count):
                self.a_node_starts(role, number)
        self.a_movable_node_starts(0, "prefill")
        self.a_movable_node_starts(1, "decode")
        self.cluster.beat()
        self.loop.run_for()

    def halves(self, number: int) -> list[SteppedNode]:
        return [node for node in self.cluster.nodes if node.record.node.name == MOVABLE[number]]

    @rule(
        length=st.integers(1, 40),
        most=st.integers(1, 12),
        stem=st.booleans(),
        choices=st.sampled_from([1, 1, 1, 3]),
        client=st.sampled_from("ab"),
        session=st.sampled_from([b"", b"one"]),
        priority=st.sampled_from([0, 0, -1, 3]),
    )
    def submit(
        self, length: int, most: int, stem: bool, choices: int, client: str, session: bytes, priority: int
    ) -> None:
        if len(self.open()) + choices > MAX_OPEN:
            return
        batch, first = PromptBatch(), len(self.readers)
        prompt = (STEM if stem else []) + list(range(first, first + length))
        for index, share in enumerate(shares(choices)):
            request = GenerationRequest(
                f"r{first}-{index}",
                prompt,
                SamplingParams(max_tokens=most, temperature=0.0),
                streamed=True,
                client=client,
                priority=priority,
                session=session,
                batch=batch,
                share=share,
                known_as=(f"r{first}",),
            )
            asked = self.cluster.asked[request.request_id] = AskedPrompt(request, most)
            self.readers.append(Reader(self.cluster, asked, enough=1000))
        self.loop.run_for()

    @rule(index=INDEX, what=st.sampled_from(["cut off", "full", "hung", "drains", "recovers", "recovers"]))
    def a_node_changes(self, index: int, what: str) -> None:
        """What happens to a movable node happens to its process, and it drains only as its role says."""
        node = self.node(index)
        if node is None or (what == "drains" and node.record.node.name in MOVABLE):
            return
        for each in self.cluster.nodes:
            if each.record.node.name == node.record.node.name:
                super().a_node_changes(self.cluster.nodes.index(each), what)

    @rule(number=st.integers(0, 1), in_time=st.booleans(), told=st.booleans())
    def a_role_changes(self, number: int, in_time: bool, told: bool) -> None:
        """A node begins to drain; or it takes its new role once it has no requests, unless it is out of time."""
        if len(halves := self.halves(number)) < len(ROLES):
            return
        serving, other = sorted(halves, key=lambda half: half.state == "standby")
        if serving.state == "up":
            serving.state = "draining"
        elif not serving.jobs:
            serving.state, other.state = "standby", "up"
        elif not in_time:
            serving.state = "up"
        if told:
            self.cluster.beat()
            self.loop.run_for()

    @rule(number=st.integers(0, 1), role=st.sampled_from(ROLES))
    def a_movable_node_starts(self, number: int, role: Role) -> None:
        if not self.halves(number):
            for each in ROLES:
                half = self.cluster.start(each, MOVABLE[number])
                half.state = "up" if each == role else "standby"

    @rule(index=INDEX, read=st.sampled_from([0, 1, 100]), how=st.sampled_from(["dies", "leaves"]))
    def a_node_ends(self, index: int, read: int, how: str) -> None:
        """Both halves of a movable node end, in one moment."""
        if (node := self.node(index)) is not None:
            for each in list(self.cluster.nodes):
                if each.record.node.name == node.record.node.name:
                    super().a_node_ends(self.cluster.nodes.index(each), read, how)


Roles.TestCase.settings = settings(max_examples=15, stateful_step_count=30, deadline=None)
TestRoles = pytest.mark.timeout(600)(Roles.TestCase)  # shrinking a failure takes minutes
