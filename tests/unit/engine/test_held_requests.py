"""The copy of a prompt batch's page table and lengths: the kernel in Triton's interpreter against its reference."""

from __future__ import annotations

import pytest
import torch

from common.engine.ops.held_requests import hold_requests, hold_requests_triton
from common.engine.ops.triton_kernel import tl

pytestmark = [
    pytest.mark.skipif(tl is None, reason="Triton is not installed"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="compiled kernels are tested in tests/gpu"),
]


@pytest.mark.parametrize("held", [1, 4, 64])
@pytest.mark.parametrize("width", [1, 7, 1030])
@pytest.mark.parametrize("lengths", [[3], [5, 1, 8, 4], []])
def test_requests_past_the_live_ones_have_no_tokens(held: int, width: int, lengths: list[int]) -> None:
    count = len(lengths)
    if count > held:
        pytest.skip("more requests than there is room for, which no graph admits")
    pages = torch.randint(1, 1 << 30, (count, width), dtype=torch.int32)
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    lens = torch.randint(1, 900, (count,), dtype=torch.int32)
    found = []
    for run in (hold_requests, hold_requests_triton):
        static = (
            torch.full((held, width + 3), 7, dtype=torch.int32),
            torch.full((held + 1,), 7, dtype=torch.int32),
            torch.full((held,), 7, dtype=torch.int32),
        )
        run(pages, starts, lens, *static)
        found.append(static)
    for actual, expected in zip(*found, strict=True):
        assert torch.equal(actual, expected)
    held_pages, held_starts, held_lens = found[1]
    assert torch.equal(held_pages[:count, :width], pages)
    assert bool((held_pages[count:] == 7).all()), "what is beyond the live requests is kept"
    assert bool((held_pages[:, width:] == 7).all())
    assert held_starts.tolist() == [*starts.tolist(), *[sum(lengths)] * (held - count)]
    assert held_lens.tolist() == [*lens.tolist(), *[0] * (held - count)]
