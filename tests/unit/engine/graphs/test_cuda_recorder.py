"""The CUDA recorder as far as it needs no GPU; the rest is in tests/gpu/test_graphs.py."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch

from common.engine.graphs.backends.cuda import CudaRecorder


class FakeGraph:
    pools: ClassVar[list[object]] = []

    def capture_begin(self, pool: object, **_: object) -> None:
        """Record nothing."""
        self.pools.append(pool)

    def capture_end(self) -> None:
        """Record nothing."""

    def replay(self) -> None:
        """Run nothing."""


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> CudaRecorder:
    for name, fake in (
        ("graph_pool_handle", object),
        ("Stream", lambda device: None),
        ("synchronize", lambda device: None),
        ("current_blas_handle", lambda: None),
        ("CUDAGraph", FakeGraph),
    ):
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(FakeGraph, "pools", [])
    return CudaRecorder(torch.device("cuda"))


def test_the_first_graph_and_the_next_after_a_failure_are_warmed_up(recorder: CudaRecorder) -> None:
    assert recorder.warm_ups == 2
    recorder.begin()
    recorder.abort()
    assert recorder.warm_ups == 2, "the first graph has failed"
    recorder.begin()
    recorder.end()
    assert recorder.warm_ups == 0
    recorder.begin()
    recorder.abort()
    assert recorder.warm_ups == 2


def test_no_capture_follows_in_the_pool_of_one_that_failed(recorder: CudaRecorder) -> None:
    """CUDA refuses a pool whose graphs are all gone, as are the segments before a break that has failed."""
    recorder.begin()
    recorder.end()
    recorder.abort()
    recorder.begin()
    first, second = FakeGraph.pools
    assert first is not second
