"""The CUDA recorder as far as it needs no GPU; the rest is in tests/gpu/test_graphs.py."""

from __future__ import annotations

import pytest
import torch

from common.engine.graphs.backends.cuda import CudaRecorder


class FakeGraph:
    def capture_begin(self, **_: object) -> None:
        """Record nothing."""

    def capture_end(self) -> None:
        """Record nothing."""

    def replay(self) -> None:
        """Run nothing."""


def test_the_first_graph_and_the_next_after_a_failure_are_warmed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, fake in (
        ("graph_pool_handle", object),
        ("Stream", lambda device: None),
        ("synchronize", lambda device: None),
        ("current_blas_handle", lambda: None),
        ("CUDAGraph", FakeGraph),
    ):
        monkeypatch.setattr(torch.cuda, name, fake)
    recorder = CudaRecorder(torch.device("cuda"))
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
