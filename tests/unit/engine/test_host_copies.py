"""Host data of one step in one block: what is unpacked is what was packed, at any offset."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.engine.host_copies import ALIGNMENT, Array, Packing, memory_for_copy, on_host, send

DTYPES = (np.int32, np.int64, np.float32, np.uint8)


@st.composite
def arrays(draw: st.DrawFn) -> list[Array]:
    made: list[Array] = []
    for _ in range(draw(st.integers(1, 6))):
        shape = draw(st.sampled_from([(0,), (1,), (3,), (17,), (0, 4), (2, 5)]))
        values = draw(st.lists(st.integers(0, 200), min_size=40, max_size=40))
        array = np.asarray(values).astype(draw(st.sampled_from(DTYPES)))
        made.append(np.resize(array, shape))
    return made


@given(arrays())
def test_unpacked_is_what_was_packed(given_arrays: list[Array]) -> None:
    packing = Packing(given_arrays)
    block = torch.empty(packing.nbytes, dtype=torch.uint8)
    packing.fill(block)
    views = packing.views(block)
    for array, view in zip(given_arrays, views, strict=True):
        assert torch.equal(view, torch.from_numpy(array))
        assert view.dtype == torch.from_numpy(array).dtype
        assert (view.data_ptr() - block.data_ptr()) % ALIGNMENT == 0


@given(arrays())
def test_on_a_cpu_nothing_is_packed(given_arrays: list[Array]) -> None:
    sent = send(given_arrays, torch.device("cpu"))
    assert all(
        torch.equal(tensor, torch.from_numpy(array)) for tensor, array in zip(sent, given_arrays, strict=True)
    )
    assert all(on_host(tensor) is tensor for tensor in sent)


def test_arrays_that_are_not_contiguous() -> None:
    table = np.arange(24, dtype=np.int32).reshape(4, 6)[:, ::2]
    packing = Packing([table])
    block = torch.empty(packing.nbytes, dtype=torch.uint8)
    packing.fill(block)
    assert torch.equal(packing.views(block)[0], torch.from_numpy(table.copy()))


def test_a_copy_needs_no_pinned_memory_where_none_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backup of a retracted request is then slow; the node does not end."""
    empty = torch.empty

    def unpinned(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory")
        return empty(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", unpinned)
    made = memory_for_copy((2, 3), torch.bfloat16, torch.device("cuda"))
    assert made.device.type == "cpu"
    assert (made.shape, made.dtype) == ((2, 3), torch.bfloat16)
