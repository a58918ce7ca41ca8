"""The CPU tape against plain execution, and what it refuses as a CUDA graph would."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from common.engine.graphs.backends.base import CaptureError, Recording
from common.engine.graphs.backends.full import FullGraphs
from common.engine.graphs.backends.tape import TapeRecorder, TapeSegment
from common.engine.ops.rotary_kv_write import rotary_kv_write


def tape(run: Callable[[], Any]) -> Recording[Any]:
    return FullGraphs(TapeRecorder()).capture(run)


def same(actual: Any, expected: Any) -> bool:
    if isinstance(expected, Tensor):
        return torch.equal(actual, expected)
    return all(same(a, e) for a, e in zip(actual, expected, strict=True))


def check(
    run: Callable[[], Any], inputs: list[Tensor], state: list[Tensor], rounds: int = 3
) -> Recording[Any]:
    """Replay is bitwise equal to eager on new inputs, and leaves the same state."""
    recording = tape(run)
    with torch.inference_mode():
        for _ in range(rounds):
            for tensor in inputs:
                tensor.copy_(torch.randn(tensor.shape) * 3)
            before = [tensor.clone() for tensor in state]
            recording.replay()
            after = [tensor.clone() for tensor in state]
            for tensor, old in zip(state, before):
                tensor.copy_(old)
            assert same(recording.output, run())
            assert same(state, after)
    return recording


X = torch.randn(3, 4)
WEIGHT = torch.nn.Parameter(torch.randn(5, 4), requires_grad=False)
STATE = torch.zeros(3, dtype=torch.int64)
COUNTS = torch.tensor([1, 2, 3])
PLANES = torch.zeros(2, 2, 4, 1, 4)


def _mixed() -> Any:
    y = F.linear(X, WEIGHT)
    left, right = y.chunk(2, -1)
    values, index = torch.cat([left, right], -1).topk(2)
    STATE.add_(index[:, 0])
    scattered = torch.zeros(3, 2)
    scattered.index_copy_(0, torch.arange(3), values)
    return scattered, index.cumsum(0), y.view(-1)[2:], y, X


def _views_and_slices() -> Any:
    y = X.softmax(-1)
    y[:, 0] = 0.5
    y[1:, 1:].mul_(2)
    return y.reshape(-1), y.t().contiguous(), y.expand(2, 3, 4), y.flatten().view(4, 3).argmax(-1)


def _out_variants() -> Any:
    total = torch.empty(3)
    torch.sum(X, -1, out=total)
    return torch.where(total > 0, total, 1.0).clamp_(max=2), torch.stack([total, X[:, 0]]).masked_fill_(
        torch.stack([total, total]) > 1, -torch.inf
    )


def _custom_op() -> Any:
    slots = torch.arange(4, 7)
    qkv = torch.stack([X + 2, X, X + 1], 1)
    rotary_kv_write(qkv, X.view(3, 1, 4), X.view(3, 1, 4), None, None, 0.0, PLANES[0], PLANES[1], slots)
    return PLANES.view(2, 8, 4).sum(1)


@pytest.mark.parametrize("run", [_mixed, _views_and_slices, _out_variants, _custom_op])
def test_replay_equals_eager(run: Callable[[], Any]) -> None:
    check(run, [X], [STATE, PLANES])


OPERATIONS: list[Callable[[Tensor, Tensor], Tensor]] = [
    lambda a, b: a + b,
    lambda a, b: a @ b,
    lambda a, b: a.mul_(0.5),
    lambda a, b: a.t(),
    lambda a, b: torch.cat([a, b], -1)[:, 1:5],
    lambda a, b: a.index_select(0, b[:, 0].argsort()),
    lambda a, b: a.copy_(b.clone()),
    lambda a, b: torch.where(a > b, a, b),
    lambda a, b: a.softmax(-1),
    lambda a, b: F.layer_norm(a, (4,)).add_(b),
    lambda a, b: a.split(2, -1)[1].repeat(1, 2),
]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 99), st.integers(0, 99)), max_size=14),
    st.integers(),
)
def test_any_program_of_views_and_mutations_replays(
    program: list[tuple[Callable[[Tensor, Tensor], Tensor], int, int]], seed: int
) -> None:
    """Programs mix views of temporaries with in-place writes into static memory."""
    torch.manual_seed(seed % 2**31)
    x, state = torch.randn(4, 4), torch.randn(4, 4)

    def run() -> Any:
        values = [x, state]
        for operation, left, right in program:
            values.append(operation(values[left % len(values)], values[right % len(values)]))
        return tuple(values[-3:])

    check(run, [x], [state, x], rounds=2)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: X.sum().item(), "waits for the device"),
        (lambda: float(X.sum()), "waits for the device"),
        (lambda: bool(X.sum() > 0), "waits for the device"),
        (lambda: X[: int(STATE[0])], "waits for the device"),
        (lambda: X.tolist(), "tolist waits for the device"),
        (lambda: X.numpy(), "numpy waits for the device"),
        (lambda: torch.equal(X, X), "waits for the device"),
        (lambda: X.nonzero(), "waits for the device"),
        (lambda: torch.where(X > 0), "waits for the device"),
        (lambda: X.masked_select(X > 0), "waits for the device"),
        (lambda: X[X > 0], "boolean mask"),
        (lambda: X.unique(), "waits for the device"),
        (lambda: X.repeat_interleave(STATE + 1, dim=0), "waits for the device"),
        (lambda: X + torch.tensor(3.0), "static slot"),
        (lambda: X.new_tensor([1.0]), "static slot"),
        (lambda: X.clone().resize_(2), "shapes and addresses are fixed"),
        (lambda: X.clone().__setitem__(X > 0, 0.0), "boolean mask"),
    ],
)
def test_what_a_graph_cannot_hold_is_refused_during_capture(call: Callable[[], Any], text: str) -> None:
    """A host sync, host data and a change of shape are refused; the recorder is usable again afterwards."""
    backend = FullGraphs(TapeRecorder())
    with pytest.raises(CaptureError, match=text):
        backend.capture(call)
    assert backend.capture(lambda: X + 1).output.shape == X.shape


def test_repeat_interleave_with_a_known_size_is_allowed() -> None:
    check(lambda: X.repeat_interleave(COUNTS, dim=0, output_size=6), [X], [])


def test_a_python_scalar_is_baked() -> None:
    """A scalar that should have been a tensor is thus detected on the CPU: the replay differs from the eager run."""
    owner = {"scale": 2.0}
    recording = tape(lambda: X * owner["scale"])
    owner["scale"] = 3.0
    recording.replay()
    assert torch.equal(recording.output, X * 2.0)


def test_an_address_is_baked() -> None:
    """A buffer that its owner replaced is stale, even if the tensor object was kept."""
    owner = [torch.ones(3)]
    parameter = torch.nn.Parameter(torch.ones(3), requires_grad=False)
    recording = tape(lambda: (owner[0] + 1, parameter + 1))
    owner[0] = torch.zeros(3)
    parameter.data = torch.zeros(3)
    recording.replay()
    assert recording.output[0].tolist() == [2, 2, 2]
    assert recording.output[1].tolist() == [2, 2, 2]


def test_host_work_between_calls_happens_once() -> None:
    runs: list[int] = []

    def run() -> Tensor:
        runs.append(1)
        return X + 1

    recording = tape(run)
    recording.replay()
    recording.replay()
    assert len(runs) == 1


def test_temporaries_are_freed_and_outputs_are_all_that_is_kept() -> None:
    def run() -> Tensor:
        y = X
        for _ in range(50):
            y = y + 1
        return y

    recording = tape(run)
    (segment,) = recording.steps
    assert isinstance(segment, TapeSegment)
    assert recording.nbytes == X.nbytes
    assert len(segment.exports) == 1
    assert sum(len(call.frees) for call in segment.calls) == len(segment.calls) - 1


def test_recordings_of_a_recorder_share_their_memory() -> None:
    """CUDA graphs share a pool too, so this tests on the CPU that kept outputs have to be cloned."""
    backend = FullGraphs(TapeRecorder())
    large = backend.capture(lambda: (X + 1, X.sum(-1)))
    small = backend.capture(lambda: (X[:2] * 2, X[:2].sum(-1)))
    assert (large.nbytes, small.nbytes) == (X.nbytes + 12, 0)
    assert small.output[0].data_ptr() == large.output[0].data_ptr()
    large.replay()
    assert same(large.output, (X + 1, X.sum(-1)))
    small.replay()
    assert same(small.output, (X[:2] * 2, X[:2].sum(-1)))
    assert not torch.equal(large.output[0], X + 1)


def test_outputs_that_nobody_reads_are_not_copied() -> None:
    held = []

    def run() -> Tensor:
        held.append(X + 1)  # held on the host, read by no graph
        return held[-1] * 2

    (segment,) = tape(run).steps
    assert isinstance(segment, TapeSegment)
    assert len(segment.exports) == 1


def test_views_of_static_memory_cost_nothing() -> None:
    recording = tape(lambda: F.linear(X, WEIGHT[:2].t().t()))
    (segment,) = recording.steps
    assert isinstance(segment, TapeSegment)
    assert len(segment.calls) == 1


def test_reuse_of_object_ids_is_not_confused() -> None:
    """Temporaries die during capture, and their ids are reused for others."""

    def run() -> Tensor:
        total = torch.zeros(3, 4)
        for index in range(200):
            total = total + (X * index).sin() * random.Random(index).random()
        return total

    check(run, [X], [])


def test_capture_does_not_load_dynamo() -> None:
    """Loading it takes seconds at start-up."""
    before = "torch._dynamo" in sys.modules
    tape(lambda: X + 1)
    assert ("torch._dynamo" in sys.modules) == before


def test_captures_do_not_nest() -> None:
    recorder = TapeRecorder()
    with pytest.raises(CaptureError, match="inside a capture"):
        FullGraphs(recorder).capture(lambda: FullGraphs(recorder).capture(lambda: X + 1))
