"""What the host does between the sight of a record and its acceptance, counted: other work does not change it.

See tests/bench/NOTES.md: this time belongs to the host, which launches the comparison of the pages.
"""

from __future__ import annotations

import sys
from collections import Counter
from types import FrameType
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kv_transfer.events import Arrived
from kv_transfer.transport.cuda import digests
from kv_transfer.transport.cuda.digest_buffers import BufferedDigests, DigestBuffers
from kv_transfer.transport.cuda.later_digests import LandingDigests
from tests.fakes.pools import layers_layout
from tests.unit.kv_transfer import test_cuda_ipc
from tests.unit.kv_transfer.rig import RECORD
from tests.unit.kv_transfer.test_cuda_ipc import Pair

PAGES, LAYERS = 64, 32  # 1,024 tokens
MAX_CALLS = 105  # Python functions from a frame to the event, whatever the number of pages
CPU = torch.device("cpu")


class Ops(TorchDispatchMode):
    """Counts the operations on tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


class Calls:
    """Counts the calls of Python functions."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        self.count += event == "call"

    def __enter__(self) -> Calls:
        sys.setprofile(self)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Pair:
    layout = layers_layout("tiny", "float32", 16, 4 * PAGES, [(1, 4)] * LAYERS)
    monkeypatch.setattr(test_cuda_ipc, "SRC", layout)
    monkeypatch.setattr(test_cuda_ipc, "DST", layout)
    pair = Pair(monkeypatch, checks_later=True)
    pair.connect()
    return pair


def accept(pair: Pair, room: int, pages: int, around: Any) -> Arrived:
    """Send a prompt; `around` is entered while its record is accepted. The kernel takes no part."""
    pair.start(room, [*range(pages)], [*range(PAGES, PAGES + pages)])
    pair.sender.finish(room, RECORD)
    pair.sender.poll()
    *before, record = pair.to_decode
    pair.to_decode.clear()
    for frame in before:
        pair.receiver.handle(pair.own, frame)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(digests, "move_pages", lambda *_: None)
        with around:
            pair.receiver.handle(pair.own, record)
            (arrived,) = pair.receiver.poll()
            pair.receiver.close(room)
    assert isinstance(arrived, Arrived)
    return arrived


def test_a_record_costs_two_copies_and_no_allocation(pair: Pair) -> None:
    for room in range(1, 6):
        ops = Ops()
        (check,) = accept(pair, room, PAGES, ops).checks
        assert ops.counts == {"aten.copy_.default": 2, "aten.slice.Tensor": 2}
        assert check.failure() is not None  # nothing was summed up
    pair.close()


def test_calls_do_not_grow_with_pages(pair: Pair) -> None:
    found: list[int] = []
    for room, pages in enumerate((2, 2, PAGES), 1):
        calls = Calls()
        accept(pair, room, pages, calls)
        found.append(calls.count)
    assert found[2] < found[1] + 8, found
    assert found[2] <= MAX_CALLS, found
    pair.close()


def started(buffers: DigestBuffers, sums: list[int], state: int | None = None) -> BufferedDigests:
    buffer = buffers.take(len(sums))
    buffer.load(range(len(sums)), 3)
    ids, into = buffer.pages(len(sums))
    assert ids.tolist() == [[*range(len(sums))]]
    assert not into.any()
    into += torch.tensor(sums)
    if state is not None:
        slot, sum_of_slot = buffer.state()
        assert slot.tolist() == [[3]]
        sum_of_slot += state
    buffer.land()
    return BufferedDigests(buffers, buffer, len(sums), state is not None)


def test_a_buffer_is_used_again_only_when_its_sums_were_read() -> None:
    buffers = DigestBuffers(100, CPU)
    several = [started(buffers, [number, -1]) for number in range(12)]
    assert len(buffers) == 0
    assert [[*each] for each in several] == [[number, (1 << 64) - 1] for number in range(12)]
    assert len(buffers) == 8  # no more are kept
    assert [*started(buffers, [5])] == [5]  # sums begin at zero again
    assert [*several[3]] == [3, (1 << 64) - 1]


def test_the_state_comes_last() -> None:
    found = started(DigestBuffers(10, CPU), [4, 5, 6], state=-2)
    assert len(found) == 4
    assert [*found] == [4, 5, 6, (1 << 64) - 2]
    assert found[1:3] == [5, 6]


def test_long_prompts_have_buffers_of_their_own() -> None:
    buffers = DigestBuffers(100_000, CPU)
    kept, sums = len(buffers), [*range(1501)]
    assert [*started(buffers, sums)] == sums
    assert len(buffers) == kept


def test_parts_of_a_buffer_are_aligned_for_kernels() -> None:
    """Triton compiles another kernel for an address that is no multiple of 16, in the middle of a request."""
    for pages in (1, 2, 3, 1021):
        buffer = DigestBuffers(pages, CPU).take(pages)
        parts = (*buffer.pages(1), *buffer.state())
        assert all(part.data_ptr() % 16 == 0 for part in parts)


def test_sums_of_their_own_are_read_where_they_are() -> None:
    found = LandingDigests(torch.tensor([1, -1]))
    assert len(found) == 2
    assert found[1] == (1 << 64) - 1
