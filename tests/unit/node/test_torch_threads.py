"""Torch's threads on the CPU do not grow with the cores of a machine that has many processes."""

from __future__ import annotations

import pytest
import torch

from common.node.torch_threads import GPU_NODE_THREADS, limit_threads


@pytest.mark.parametrize(
    ("device", "cores", "threads", "expected"),
    [
        ("cpu", 64, 8, [8]),
        ("cpu", 64, 0, []),
        ("cuda", 64, 1, [GPU_NODE_THREADS]),
        ("cuda", 2, 1, []),
    ],
)
def test_they_are_those_of_the_cluster_file_or_few(
    monkeypatch: pytest.MonkeyPatch, device: str, cores: int, threads: int, expected: list[int]
) -> None:
    told: list[int] = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: cores)
    monkeypatch.setattr(torch, "set_num_threads", told.append)
    limit_threads(torch.device(device), threads)
    assert told == expected
