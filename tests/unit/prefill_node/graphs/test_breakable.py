"""Breakable graphs, whose segments are tapes here, replay what an eager run computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from common.engine.graphs.backends.base import CaptureError
from common.engine.graphs.backends.full import FullGraphs
from common.engine.graphs.backends.tape import TapeRecorder
from prefill_node.graphs.backends.break_point import break_point, next_segment
from prefill_node.graphs.backends.breakable import BreakableGraphs

X = torch.randn(4, 3)


class Layer:
    """A break that reads a host value of the live batch, which no graph could contain."""

    def __init__(self) -> None:
        self.live = 4
        self.calls: list[int] = []
        self.sent: list[float] = []

    @break_point
    def attend(self, layer: int, x: Tensor) -> Tensor:
        self.calls.append(layer)
        out = torch.zeros_like(x)
        out[: self.live] = x[: self.live].cumsum(0)
        return out

    @break_point
    def attend_into(self, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        out = torch.zeros_like(x) if out is None else out
        out[: self.live] = x[: self.live] * self.live
        return out

    @break_point
    def send(self, x: Tensor) -> None:
        self.sent.append(float(x[: self.live].sum()))

    def run(self) -> Tensor:
        y = X * 2
        for layer in range(3):
            y = y + self.attend(layer, y.tanh()) * 0.5
        return y + X


def test_replay_equals_eager_with_live_host_facts_in_the_breaks() -> None:
    """Attention is a break, so any mix of lengths fits one bucket."""
    layer = Layer()
    recording = BreakableGraphs(TapeRecorder()).capture(layer.run)
    assert recording.breaks == 3
    assert len(recording.steps) == 7
    with torch.inference_mode():
        for live in (4, 1, 3, 2):
            X.normal_()
            layer.live = live
            layer.calls.clear()
            recording.replay()
            assert layer.calls == [0, 1, 2]
            assert torch.equal(recording.output, layer.run())


def test_outside_a_capture_and_in_a_full_one_a_break_point_is_a_plain_call() -> None:
    layer = Layer()
    assert layer.run().shape == X.shape
    recording = FullGraphs(TapeRecorder()).capture(layer.run)
    assert (recording.breaks, len(recording.steps)) == (0, 1)


def test_no_break_hit_is_one_graph() -> None:
    recording = BreakableGraphs(TapeRecorder()).capture(lambda: (X * 2).sum(0))
    assert (recording.breaks, len(recording.steps)) == (0, 1)


def test_a_new_segment_continues_with_the_values_of_the_one_before_and_breaks_nothing() -> None:
    def run() -> Tensor:
        kept = X * 3
        dropped = kept.tanh()
        y = dropped + 1
        del dropped
        next_segment()
        return y * kept

    recording = BreakableGraphs(TapeRecorder()).capture(run)
    assert (recording.breaks, len(recording.steps)) == (0, 2)
    with torch.inference_mode():
        for _ in range(2):
            X.normal_()
            recording.replay()
            assert torch.equal(recording.output, run()), "outside a capture it does nothing"


def test_a_break_may_write_into_the_bridge_or_return_nothing() -> None:
    layer = Layer()

    def run() -> Tensor:
        y = X + 1
        layer.send(y)
        z = layer.attend_into(x=y)
        layer.send(z)
        return z * y

    recording = BreakableGraphs(TapeRecorder()).capture(run)
    with torch.inference_mode():
        for live in (2, 4):
            layer.live = live
            X.normal_()
            X[live:] = 0
            layer.sent.clear()
            recording.replay()
            replayed = recording.output[:live].clone()
            sent = list(layer.sent)
            assert torch.equal(replayed, run()[:live])
            assert layer.sent[2:] == sent


def test_a_tensor_may_cross_several_breaks_and_be_changed_after_them() -> None:
    layer = Layer()

    def run() -> Tensor:
        kept = X * 3
        view = kept[1:]
        a = layer.attend(0, kept)
        view.add_(a[1:])
        b = layer.attend(1, view.contiguous())
        kept.mul_(2)
        return torch.cat([kept[:-1] + b, view])

    recording = BreakableGraphs(TapeRecorder()).capture(run)
    with torch.inference_mode():
        for _ in range(3):
            X.normal_()
            recording.replay()
            assert torch.equal(recording.output, run())


def test_nested_breaks_are_forbidden() -> None:
    @break_point
    def inner(x: Tensor) -> Tensor:
        return x + 1

    @break_point
    def outer(x: Tensor) -> Tensor:
        return inner(x) + 1

    backend = BreakableGraphs(TapeRecorder())
    with pytest.raises(CaptureError, match=r"inner inside break point .*outer.*remove the inner decorator"):
        backend.capture(lambda: outer(X * 2) * 2)
    assert torch.equal(outer(X), X + 1 + 1)
    assert backend.capture(lambda: X * 2).breaks == 0


def test_an_error_in_a_break_or_after_it_leaves_no_capture_open() -> None:
    backend = BreakableGraphs(TapeRecorder())

    @break_point
    def failing(x: Tensor) -> Tensor:
        raise ZeroDivisionError("in the break")

    with pytest.raises(ZeroDivisionError):
        backend.capture(lambda: failing(X * 2))
    layer = Layer()

    def sync() -> Any:
        return layer.attend(0, X + 1).sum().item()

    with pytest.raises(CaptureError, match="waits for the device"):
        backend.capture(sync)
    assert backend.capture(layer.run).breaks == 3


def test_a_break_that_changes_its_form_is_an_error() -> None:
    @break_point
    def fickle(x: Tensor) -> Tensor:
        return x[: len(sizes)]

    sizes = [1, 2]
    recording = BreakableGraphs(TapeRecorder()).capture(lambda: fickle(X * 2) + 1)
    sizes.pop()
    with pytest.raises(CaptureError, match=r"returned \(1, 3\) in replay and \(2, 3\) in capture"):
        recording.replay()


class _Diary(TapeRecorder):
    """Records calls to a recorder in order; every look at its memory finds more in use."""

    warm_ups = 2

    def __init__(self) -> None:
        super().__init__()
        self.told: list[str] = []

    def begin(self) -> None:
        self.told.append("begin")
        super().begin()

    def memory(self) -> int:
        self.told.append("memory")
        return 100 * len(self.told)


@pytest.mark.parametrize("backend", [BreakableGraphs, FullGraphs])
def test_what_warm_ups_take_is_not_the_graphs(backend: type[BreakableGraphs] | type[FullGraphs]) -> None:
    """A CUDA recorder frees warm-up memory before the capture, which could not use it, and measures from there."""
    diary = _Diary()

    def run() -> Tensor:
        diary.told.append("run")
        return X * 2

    assert backend(diary).capture(run).nbytes == 300
    assert diary.told == ["run", "run", "memory", "begin", "run", "memory"]
