"""The router while clients, nodes, links and time do what they may at any moment, in any order.

Checked at every step: each client has the beginning of its answer, and each counter agrees with the requests in flight.
Checked at the end, when nothing disturbs any more: every request has ended once, and nothing of it is left anywhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from common.errors import RequestError
from common.messages.generation import OutputToken, SamplingParams
from common.messages.identity import Role
from common.messages.prefill_inbox import Prefill
from router.dispatch.generation import FINISH_ABORT, AnswerComplete, GenerationRequest, PromptBatch
from router.dispatch.limits import DispatchLimits
from router.dispatch.shared_prompt import shares
from router.nodes.placement import LeastLoaded, PlacementPolicy, RoundRobin, decode_cost, prefill_cost
from tests.fakes.scripted_cluster import AskedPrompt, ScriptedCluster, SteppedNode
from tests.fakes.stepped_loop import SteppedLoop

INDEX = st.integers(0, 63)  # of a node or request, modulo how many there are
# Failures of an attempt that a node of each role may report, and what becomes of the request.
CODES = [
    "overloaded",
    "transfer_failed",
    "checksum_failed",
    "internal_error",
    "preempted",
    "moved",
    "node_lost",
]
MAX_OPEN = 6


class Reader:
    """A client that reads its answer, until it leaves or has enough."""

    def __init__(self, cluster: ScriptedCluster, asked: AskedPrompt, enough: int) -> None:
        """`enough`: tokens after which the text is complete for this client, whatever follows."""
        self.asked = asked
        self.ids: list[int] = []
        self.finish: list[str] = []
        self.error: BaseException | None = None
        self.left = self.aborted = False
        self._cluster = cluster
        self._enough = enough
        self._waits = False  # for the next delta
        self._reads = asyncio.Event()
        self._reads.set()
        self.task = cluster.loop.create_task(self._read())

    @property
    def over(self) -> bool:
        return self.task.done()

    @property
    def complete(self) -> bool:
        return len(self.ids) >= self._enough

    def pause(self, paused: bool) -> None:
        if paused:
            self._reads.clear()
        else:
            self._reads.set()

    def take(self, tokens: Sequence[OutputToken]) -> bool:
        assert self._waits, "the reader is busy"
        assert self.ids, "the first tokens are yielded"
        if not self._reads.is_set() or len(self.ids) + len(tokens) >= self._enough:
            return False
        self.ids += [token.id for token in tokens]
        assert len(self.ids) < self.asked.length, "the last tokens are yielded"
        return True

    async def _read(self) -> None:
        deltas = self._cluster.dispatcher.generate(self.asked.request, self.take)
        try:
            self._waits = True
            async for delta in deltas:
                self._waits = False
                assert not self.finish, "a delta follows the last one"
                self.ids += [token.id for token in delta.tokens]
                if delta.finish_reason is not None:
                    self.finish.append(delta.finish_reason)
                elif self.complete:
                    with suppress(AnswerComplete, StopAsyncIteration):
                        await deltas.athrow(AnswerComplete())
                    return
                await self._reads.wait()
                self._waits = True
        except RequestError as error:
            self.error = error
            self.asked.request.batch.failed = True
        finally:
            await deltas.aclose()


class Lifecycles(RuleBasedStateMachine):
    @initialize(
        attempts=st.sampled_from([1, 3]),
        most=st.sampled_from([3, 8]),
        timeout=st.sampled_from([30.0, 30.0, 1.0]),
        per_node=st.sampled_from([1, 1 << 20]),
        pages=st.sampled_from([2, 100]),
        hold=st.sampled_from([0.0, 0.05]),
        crashes=st.sampled_from([0, 2]),
        in_turn=st.booleans(),
        prefills=st.integers(1, 2),
        decodes=st.integers(1, 2),
    )
    def start(
        self,
        attempts: int,
        most: int,
        timeout: float,
        per_node: int,
        pages: int,
        hold: float,
        crashes: int,
        in_turn: bool,
        prefills: int,
        decodes: int,
    ) -> None:
        limits = DispatchLimits(
            max_attempts=attempts,
            max_requests=most,
            request_timeout=timeout,
            placement_wait=4.0,
            retry_ratio=1.0,
            queue_wait=6.0,
            max_crashes=crashes,
            reserved_tokens=16,
            first_token_hold=hold,
            requests_per_node=per_node,
        )
        self.loop = SteppedLoop()
        policies: dict[Role, PlacementPolicy] = {
            "prefill": RoundRobin() if in_turn else LeastLoaded(prefill_cost),
            "decode": RoundRobin() if in_turn else LeastLoaded(decode_cost),
        }
        self.cluster = ScriptedCluster(self.loop, limits, policies, pages)
        self.readers: list[Reader] = []
        self.most = most
        for number in range(prefills):
            self.cluster.start("prefill", f"prefill-{number}")
        for number in range(decodes):
            self.cluster.start("decode", f"decode-{number}")

    def open(self) -> list[Reader]:
        return [reader for reader in self.readers if not reader.over]

    def node(self, index: int) -> SteppedNode | None:
        nodes = self.cluster.nodes
        return nodes[index % len(nodes)] if nodes else None

    # ---- what clients do

    @rule(
        length=st.integers(1, 40),
        most=st.integers(1, 12),
        stop=st.integers(1, 16),
        enough=st.sampled_from([3, 1000, 1000, 1000]),
        choices=st.sampled_from([1, 1, 1, 3]),
        streamed=st.booleans(),
        client=st.sampled_from("ab"),
    )
    def submit(
        self,
        length: int,
        most: int,
        stop: int,
        enough: int,
        choices: int,
        streamed: bool,
        client: str,
    ) -> None:
        if len(self.open()) + choices > MAX_OPEN:
            return
        batch, name = PromptBatch(), f"r{len(self.readers)}"
        prompt = list(range(len(self.readers), len(self.readers) + length))
        for index, share in enumerate(shares(choices)):
            request = GenerationRequest(
                f"{name}-{index}",
                prompt,
                SamplingParams(max_tokens=most, temperature=0.0),
                streamed,
                client=client,
                batch=batch,
                share=share,
                known_as=(name,),
            )
            asked = self.cluster.asked[request.request_id] = AskedPrompt(request, min(most, stop))
            self.readers.append(Reader(self.cluster, asked, enough))
        self.loop.run_for()

    @rule(
        index=INDEX,
        how=st.sampled_from(["leaves", "aborts", "pauses", "goes on", "goes on"]),
        at_once=st.booleans(),
    )
    def client(self, index: int, how: str, at_once: bool) -> None:
        if not (readers := self.open()):
            return
        reader = readers[index % len(readers)]
        request = reader.asked.request
        if how == "leaves":
            reader.left = True
            reader.pause(False)
            reader.task.cancel()
        elif how == "aborts":
            for each in readers:
                each.aborted = each.aborted or each.asked.request.known_as == request.known_as
            abort = self.cluster.dispatcher.running.abort
            self.loop.call_soon(lambda: abort(request.client, request.known_as))
        else:
            reader.pause(how == "pauses")
        if not at_once:
            self.loop.run_for()

    # ---- what nodes and links do

    @rule(index=INDEX, jobs=st.integers(1, 4), tokens=st.integers(1, 5), again=st.sampled_from([0, 0, 2]))
    def work(self, index: int, jobs: int, tokens: int, again: int) -> None:
        if (node := self.node(index)) is not None and not node.cut_off:
            node.read()
            for job in list(node.jobs.values())[:jobs]:
                node.work(job, tokens, again)

    @rule(index=INDEX, most=st.sampled_from([1, 2, 100]))
    def deliver(self, index: int, most: int) -> None:
        if (node := self.node(index)) is not None:
            node.deliver(most)

    @rule(turns=st.integers(1, 3), tokens=st.integers(1, 5))
    def everything_works(self, turns: int, tokens: int) -> None:
        """Let requests get somewhere: random single steps seldom do."""
        for _ in range(turns):
            for node in list(self.cluster.nodes):
                if not node.cut_off:
                    node.read()
                    for job in list(node.jobs.values()):
                        node.work(job, tokens)
                    node.deliver()

    @rule(index=INDEX, which=INDEX, code=st.sampled_from(CODES))
    def a_job_fails(self, index: int, which: int, code: str) -> None:
        if (node := self.node(index)) is not None and not node.cut_off:
            node.read()
            if jobs := list(node.jobs.values()):
                job = jobs[which % len(jobs)]
                if code != "moved" or isinstance(job.message, Prefill):
                    node.fail(job, code)

    @rule(seconds=st.sampled_from([0.01, 0.1, 0.5, 3.0]))
    def time_passes(self, seconds: float) -> None:
        self.cluster.pass_time(seconds)

    @rule(index=INDEX, what=st.sampled_from(["cut off", "full", "hung", "drains", "recovers", "recovers"]))
    def a_node_changes(self, index: int, what: str) -> None:
        if (node := self.node(index)) is None:
            return
        if what == "drains":
            node.state = "draining"
        elif what == "recovers":
            self.recover(node)
        else:
            node.cut_off = node.cut_off or what == "cut off"
            node.full = node.full or what == "full"
            node.loop_age = 4000 if what == "hung" else node.loop_age
        self.cluster.beat()
        self.loop.run_for()

    def recover(self, node: SteppedNode) -> None:
        node.cut_off = node.full = False
        node.loop_age = 0

    @rule(index=INDEX, read=st.sampled_from([0, 1, 100]), how=st.sampled_from(["dies", "leaves"]))
    def a_node_ends(self, index: int, read: int, how: str) -> None:
        if (node := self.node(index)) is not None:
            if how == "dies":
                node.die(read)
            else:
                node.leave()
            self.loop.run_for()

    @rule(role=st.sampled_from(["prefill", "decode"]), number=st.integers(0, 2))
    def a_node_starts(self, role: str, number: int) -> None:
        name = f"{role}-{number}"
        if not [node for node in self.cluster.nodes if node.record.node.name == name]:
            self.cluster.start("prefill" if role == "prefill" else "decode", name)

    # ---- what holds

    @invariant()
    def answers_are_right_and_counts_agree(self) -> None:
        if not hasattr(self, "cluster"):
            return
        assert not self.loop.problems
        assert not self.cluster.socket.refused
        assert not self.cluster.broken
        core = self.cluster.core
        for reader in self.readers:
            assert reader.ids == reader.asked.answer[: len(reader.ids)], (
                "tokens are lost, repeated or of others"
            )
            if reader.over:
                self.check_end(reader)
        assert core.dispatcher.active <= self.most
        assert len(core.dispatcher.running) == core.dispatcher.active
        for node in core.registry:
            for room in node.rooms:
                attempt = core.dispatcher.attempt(room)
                assert attempt is not None
                assert node in (attempt.prefill, attempt.decode)
            assert node.rooms.tokens >= 0

    def check_end(self, reader: Reader) -> None:
        if reader.task.cancelled():
            assert reader.left
        elif (problem := reader.task.exception()) is not None:
            raise problem
        elif reader.finish == [FINISH_ABORT]:
            assert reader.aborted
        elif reader.finish:
            assert reader.finish == [reader.asked.finish]
            assert reader.ids == reader.asked.answer
        else:
            assert reader.error is not None or reader.complete or reader.left

    def teardown(self) -> None:
        """Nothing disturbs any more: everything ends by itself, long before the last deadline."""
        if not hasattr(self, "cluster"):
            return
        for reader in self.readers:
            reader.pause(False)
        for node in self.cluster.nodes:
            self.recover(node)
        for _ in range(200):
            if not self.open():
                break
            self.everything_works(1, 5)
            self.cluster.pass_time(0.25)
        assert not self.open()
        self.everything_works(2, 5)
        self.cluster.pass_time(6.0)  # suspects get their trials, probes end, breakers and looks are due
        self.everything_works(2, 5)
        self.answers_are_right_and_counts_agree()
        self.check_idle()
        self.cluster.close()
        assert not asyncio.all_tasks(self.loop)
        assert not self.loop.timers()
        assert not self.loop.problems
        self.loop.close()

    def check_idle(self) -> None:
        core = self.cluster.core
        dispatcher = core.dispatcher
        admission = dispatcher.admission
        assert dispatcher.active == 0
        assert (admission.waiting, admission.tokens, admission.requests, admission.clients) == (0, 0, 0, 0)
        for node in core.registry:
            assert (len(node.rooms), node.rooms.tokens, node.rooms.ms) == (0, 0, 0.0), node.name
        for living in self.cluster.nodes:
            living.read()
            assert not living.jobs, "a node was not told that a request has ended"
        for reader in self.readers:
            report = dispatcher.timelines.get(reader.asked.request.request_id)
            assert report is None or report["outcome"] != "running"


Lifecycles.TestCase.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)
TestLifecycles = pytest.mark.timeout(600)(Lifecycles.TestCase)  # shrinking a failure takes minutes
