"""The next forward is chosen shortly before the running one ends."""

from __future__ import annotations

import pytest

from common.node.completion import Deferred
from prefill_node.pacing import KEPT, MARGIN, LaunchPacing
from tests.fakes.clock import Clock
from tests.fakes.node_cluster import NodeCluster, Shape
from tests.fakes.scenarios import expect_reference, prompt_of

TICK = 0.0005


class Forward(Deferred):
    """Ends when the test says so."""

    def __init__(self, done: bool = False) -> None:
        self.done = done

    def ready(self) -> bool:
        return self.done


class Rig:
    """Launches take 2 ms of the host."""

    def __init__(self) -> None:
        self.clock = Clock(0.0)
        self.pacing = LaunchPacing(self.clock)
        self.waits = 0

    def meanwhile(self) -> None:
        self.waits += 1
        self.clock.now += TICK

    def launch(self, seconds: float, host: float = 0.002) -> Forward:
        """Return a forward that runs for so long."""
        self.pacing.hold(self.meanwhile)
        self.clock.now += host
        forward = Forward()
        self.pacing.launched(forward, seconds)
        return forward


def test_the_next_launch_begins_as_long_before_the_end_as_launches_take() -> None:
    rig = Rig()
    rig.launch(0.1)
    assert rig.clock.now == 0.002, "nothing to wait for"
    rig.launch(0.1)
    begun = rig.clock.now - 0.002
    assert begun == pytest.approx(0.102 - 0.002 - MARGIN, abs=TICK)
    rig.launch(0.1)
    assert rig.clock.now - 0.002 == pytest.approx(0.202 - 0.002 - MARGIN, abs=TICK), "it runs after the first"


def test_a_forward_that_ends_early_ends_the_wait() -> None:
    rig = Rig()
    forward = rig.launch(10.0)

    def end_soon() -> None:
        rig.meanwhile()
        forward.done = rig.waits == 4

    rig.pacing.hold(end_soon)
    assert rig.waits == 4
    rig.pacing.launched(Forward(), 0.1)
    rig.pacing.hold(rig.meanwhile)
    assert rig.clock.now < 1.0, "the next one is predicted from its own launch"


def test_a_slow_launch_is_forgotten_in_the_end() -> None:
    rig = Rig()
    rig.launch(1.0, host=0.5)
    last = rig.launch(1.0)
    assert rig.clock.now == pytest.approx(0.5 + 1.0 - 0.5 - MARGIN + 0.002, abs=TICK)
    for _ in range(60):
        last.done = True
        last = rig.launch(1.0)
    before = rig.clock.now
    rig.pacing.hold(rig.meanwhile)
    assert rig.clock.now - before == pytest.approx(1.0 - 0.5 * KEPT**61 - MARGIN, abs=0.004)


def test_a_prompt_that_arrives_during_a_forward_takes_part_in_the_next_one() -> None:
    """On a node that has measured its forwards; the long prompt is cut, and the short one passes its second chunk."""

    class Ticking(Deferred):
        def ready(self) -> bool:
            cluster.clock.now += TICK
            if len(calls) == 1 and cluster.clock.now > began + 0.02:
                calls.append(cluster.submit(prompt_of(3, 7), 2))
            return False

    calls = []
    measured = {8: 50.0, 16: 100.0, 32: 200.0}
    with NodeCluster(Shape(completion=Ticking, chunk_tokens=32, measured=measured)) as cluster:
        began = cluster.clock.now
        calls.append(cluster.submit(prompt_of(40), 2))
        cluster.run()
        long, short = calls
        expect_reference(long, short)
        assert (short.first_token_turn or 0) < (long.first_token_turn or 0)
        cluster.settle()


def test_grants_are_read_while_the_node_waits_for_the_next_launch() -> None:
    granted: list[bool] = []

    class Ticking(Deferred):
        def ready(self) -> bool:
            cluster.clock.now += TICK
            granted.extend(each.granted for each in cluster.prefill.node.queues.computing.values())
            return False

    measured = {8: 50.0, 16: 100.0, 32: 200.0}
    with NodeCluster(Shape(completion=Ticking, chunk_tokens=32, measured=measured)) as cluster:
        first = cluster.submit(prompt_of(8), 2)
        cluster.run()
        cluster.settle()
        late = cluster.submit(prompt_of(8, 7), 2, legs="p")
        cluster.turn_one(cluster.prefill)
        cluster.send_leg(late, "d")
        cluster.turn_one(cluster.decode)
        granted.clear()
        cluster.turn_one(cluster.prefill)
        assert granted[:3] == [False, True, True], "of some 100 checks until the forward ends"
        cluster.run()
        expect_reference(first, late)
        cluster.settle()
