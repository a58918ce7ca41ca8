"""Predicted and measured times of forwards, and the queue in milliseconds."""

from __future__ import annotations

import numpy as np
import pytest

from common.messages.generation import ImageSpan, SamplingParams
from common.node.completion import Deferred
from prefill_node.cost_curve import CostCurve
from prefill_node.forward_times import REPORTED, ForwardTimes
from prefill_node.queues import Queues
from prefill_node.request import PrefillRequest
from prefill_node.scheduler import Chunk
from tests.fakes.node_cluster import NodeCluster, Shape
from tests.fakes.scenarios import expect_reference, prompt_of

SPAN = ImageSpan(1, 2, bytes(32))


def curve() -> CostCurve:
    return CostCurve((8, 16, 32), {8: 8.0, 16: 16.0, 32: 32.0})


def request(room: int, tokens: int, images: tuple[ImageSpan, ...] = ()) -> PrefillRequest:
    params = SamplingParams(max_tokens=1)
    return PrefillRequest(room, "r", np.arange(tokens), 0, params, "d", 0.0, images=images)


def test_a_curve_that_was_measured_learns_from_forwards() -> None:
    times = ForwardTimes(curve(), learns=True)
    times.begin([Chunk(request(1, 8), 0, 8)])
    times.begin([Chunk(request(2, 40), 8, 16)])
    times.end(12.0)
    assert 8.0 < times.curve.ms(8) < 12.0
    assert (times.measured_seconds, times.predicted_seconds) == (0.012, 0.008)
    times.end(None)
    assert times.measured_seconds == 0.012, "not measured"


def test_without_measurements_at_its_start_a_curve_stays_as_it_is() -> None:
    times = ForwardTimes(curve())
    times.begin([Chunk(request(1, 8), 0, 8)])
    times.end(12.0)
    assert times.curve.ms(8) == 8.0
    assert times.measured_seconds == 0.012


def test_forwards_with_images_teach_nothing() -> None:
    times = ForwardTimes(curve(), learns=True)
    times.begin([Chunk(request(1, 8, (SPAN,)), 0, 8)])
    times.end(100.0)
    times.begin([])
    times.end(0.0)
    assert times.curve.ms(8) == 8.0
    assert times.measured_seconds == 0.0


def test_the_queue_counts_what_waits_what_is_cut_and_what_runs() -> None:
    times, queues = ForwardTimes(curve()), Queues()
    assert times.queued_ms(queues) == 0.0
    queues.wait(request(1, 100))
    assert times.queued_ms(queues) == pytest.approx(100.0), "at the rate of a step"
    queues.wait(begun := request(2, 12))
    queues.admit(begun, 0.0)
    begun.scheduled = 4
    assert times.queued_ms(queues) == pytest.approx(108.0, rel=0.01)
    times.begin([Chunk(begun, 4, 8)])
    begun.scheduled = 12
    assert times.queued_ms(queues) == pytest.approx(108.0, rel=0.01), "in flight"
    times.end(8.0)
    assert times.queued_ms(queues) == pytest.approx(100.0)


def test_the_router_is_told_of_the_times_of_prompts() -> None:
    told = dict(ForwardTimes(curve()).prompt_times())
    assert told[1] == 8.0
    assert told[1024] >= 1024.0


def test_reported_times_are_computed_once_per_change(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    prompt_ms = CostCurve.prompt_ms

    def counted(self: CostCurve, tokens: int, start: int = 0) -> float:
        asked.append(tokens)
        return prompt_ms(self, tokens, start)

    monkeypatch.setattr(CostCurve, "prompt_ms", counted)
    times = ForwardTimes(curve(), learns=True)
    before = times.prompt_times()
    assert asked == [*REPORTED]
    times.begin([Chunk(request(1, 8), 0, 8)])
    times.end(None)
    assert times.prompt_times() == before
    assert asked == [*REPORTED], "nothing was learnt"
    times.begin([Chunk(request(1, 8), 0, 8)])
    times.end(12.0)
    assert dict(times.prompt_times())[1] > dict(before)[1]


def test_a_node_reports_both_times_and_its_queue() -> None:
    with NodeCluster(Shape(completion=Deferred, chunk_tokens=16)) as cluster:
        calls = [cluster.submit(prompt_of(40, seed), 2) for seed in range(2)]
        cluster.turn(2)
        busy = cluster.prefill.link.load
        assert busy.queued_ms > 0
        assert len(busy.prompt_times) > 1
        cluster.run()
        expect_reference(*calls)
        cluster.turn(2)
        link = cluster.prefill.link
        assert link.counters.forward_seconds > 0
        assert link.counters.predicted_forward_seconds > 0
        assert link.load.queued_ms == 0.0
        cluster.settle()
