"""The all-reduce over peer memory, compiled: ranks in processes that share one GPU, or have one each."""

from __future__ import annotations

import pytest
import torch

from tests.fakes.peer_processes import run_peers

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("default"),
]
TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
DEVICES = [("cuda:0", "cuda:0"), pytest.param(("cuda:0", "cuda:1"), marks=TWO)]


@pytest.mark.parametrize("devices", DEVICES, ids=["one GPU", "two GPUs"])
def test_ranks_sum_and_norm_rows_of_each_other(devices: tuple[str, str]) -> None:
    """Eager calls, a graph, and a rank that does not come."""
    assert run_peers(devices, {}) == [0, 0]
