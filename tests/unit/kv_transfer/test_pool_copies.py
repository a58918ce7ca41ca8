"""Checksums of a pool's pages and slots on the CPU: any changed or moved byte changes them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from kv_transfer.transport.cuda.pool_copies import MovedPool
from tests.fakes.pools import plain_pool


def pool() -> tuple[MovedPool, Tensor]:
    made = plain_pool(3, 2, 8, 4, 6, torch.float32, torch.device("cpu"))
    made.storage.copy_(torch.arange(made.storage.numel()) % 251)
    return MovedPool(made.layout, made.storage), made.storage


def sums(of: MovedPool, pages: list[int]) -> list[int]:
    found = of.sums(pages, [])
    found.add_pages()
    found.add_states(range(6))
    return found.on_host().tolist()


def test_equal_pages_have_equal_sums() -> None:
    of, storage = pool()
    before = sums(of, [1, 2, 4])
    assert len(set(before)) == 3
    assert sums(of, [4, 1]) == [before[2], before[0]]
    storage[of.memory.groups[0].offsets[3] * 16 + 2 * 256 + 100] += 1
    assert [a == b for a, b in zip(before, sums(of, [1, 2, 4]), strict=True)] == [True, False, True]


def test_bytes_are_copied_by_address() -> None:
    of, storage = pool()
    host = torch.zeros(64, dtype=torch.uint8)
    at = np.array([3, 40], dtype=np.int64)
    of.copy(host.data_ptr() + at, storage.data_ptr() + at, np.array([2, 5]))
    assert host[3:5].tolist() == [3, 4]
    assert host[40:45].tolist() == [40, 41, 42, 43, 44]
    assert int(host.sum()) == 3 + 4 + 40 + 41 + 42 + 43 + 44


@pytest.mark.parametrize("pages", [[], [3]])
def test_a_sum_of_few_pages(pages: list[int]) -> None:
    assert len(sums(pool()[0], pages)) == len(pages)
