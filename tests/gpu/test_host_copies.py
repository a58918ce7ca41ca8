"""Each step has a pinned block of its own on a real GPU: of many steps in flight, none sees another's data."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from common.engine.host_copies import ALIGNMENT, on_host, send

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_blocks_are_not_reused_before_their_copy_is_done() -> None:
    device = torch.device("cuda")
    busy = torch.randn(4096, 4096, device=device)
    sums = []
    for step in range(200):
        busy = busy @ busy * 1e-4  # the stream lags the host
        first, second = send(
            [np.full(3001, step, dtype=np.int64), np.full((7, 9), step, dtype=np.float32)], device
        )
        assert first.data_ptr() % ALIGNMENT == second.data_ptr() % ALIGNMENT == 0
        sums.append(on_host(torch.stack((first.sum(), second.sum().long()))))
    torch.cuda.synchronize()
    assert [tuple(each.tolist()) for each in sums] == [(3001 * step, 63 * step) for step in range(200)]
