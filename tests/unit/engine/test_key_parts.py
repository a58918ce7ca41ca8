"""Parts of keys put together by the last program of a launch, in Triton's interpreter, as by a launch of their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from common.engine.ops.decode_attention import decode_triton
from common.engine.ops.key_parts import Division, KeyParts, arrivals_of, choose_division, choose_splits
from common.engine.ops.triton_kernel import tl
from common.engine.ops.verify_attention import verify_triton
from tests.unit.engine.scattered_cache import BAD_PAGE, Cache

pytestmark = [
    pytest.mark.skipif(tl is None, reason="Triton is not installed"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="compiled kernels are tested in tests/gpu"),
    pytest.mark.usefixtures("poisoned_memory"),
]


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """What torch hands out is full of NaN."""
    torch.use_deterministic_algorithms(True)
    assert torch.ones(1).new_empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def trees(batch: int, width: int, new: int) -> Tensor:
    """[batch, new, width]: random parents."""
    mask = torch.eye(width, dtype=torch.bool).repeat(batch, 1, 1)
    for row in mask:
        for node in range(1, width):
            row[node] |= row[int(torch.randint(node, (1,)))]
    return mask[:, width - new :]


@pytest.mark.parametrize(
    ("dtype", "heads", "kv_heads", "dim", "window", "splits"),
    [
        (torch.float32, 2, 2, 16, None, 1),
        (torch.float32, 4, 2, 16, None, 8),
        (torch.float16, 3, 1, 24, 40, 3),
        (torch.float32, 17, 1, 128, None, 5),  # more lines and parts than are put together at once
    ],
)
def test_decode(
    dtype: torch.dtype, heads: int, kv_heads: int, dim: int, window: int | None, splits: int
) -> None:
    """Short requests leave parts empty, a padding row all of them; a second call finds zeros again."""
    cache = Cache([90], 16, kv_heads, dim, dtype)
    lengths = torch.tensor([*cache.lengths, 0], dtype=torch.int32)
    table = torch.cat([cache.page_table, torch.full_like(cache.page_table[:1], BAD_PAGE)])
    query = torch.randn(len(lengths), heads, dim, dtype=dtype)
    query[-1] = torch.nan
    arrivals = arrivals_of("cpu")
    args = *cache.planes, table, lengths, 4096, window, dim**-0.5, splits
    expected = decode_triton(query, *args)
    for _ in range(2):
        assert torch.equal(decode_triton(query, *args, arrivals=arrivals), expected)
        assert not arrivals.any()
    limit = 2e-3 if dtype == torch.float16 else 3e-6
    for row in range(len(cache.lengths)):
        wanted = cache.expected(row, query[row : row + 1], window)
        torch.testing.assert_close(expected[row : row + 1].double(), wanted, atol=limit, rtol=limit)
    assert not expected[-1].any()


@pytest.mark.parametrize(
    ("dtype", "heads", "kv_heads", "dim", "window", "new", "width", "splits"),
    [
        (torch.float32, 2, 2, 16, None, 2, 2, 1),
        (torch.float32, 4, 2, 16, None, 2, 4, 3),
        (torch.float16, 3, 1, 24, 3, 3, 8, 2),
        (torch.float16, 1, 1, 16, 9, 66, 66, 2),  # two tiles of rows
    ],
)
def test_verify(
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    dim: int,
    window: int | None,
    new: int,
    width: int,
    splits: int,
) -> None:
    """The parts before the last are empty where the prefix is short."""
    cache = Cache([width + 20], 16, kv_heads, dim, dtype)
    lengths = torch.tensor([*cache.lengths, 0], dtype=torch.int32)
    table = torch.cat([cache.page_table, torch.full_like(cache.page_table[:1], BAD_PAGE)])
    query = torch.randn(len(lengths) * new, heads, dim, dtype=dtype)
    query[-new:] = torch.nan
    arrivals, masks = arrivals_of("cpu"), trees(2, width, new)
    args = *cache.planes, table, lengths, masks, 4096, window, dim**-0.5, Division(splits, 64, 2)
    expected = verify_triton(query, *args)
    for _ in range(2):
        assert torch.equal(verify_triton(query, *args, arrivals=arrivals), expected)
        assert not arrivals.any()
    assert not expected.isnan().any()
    assert not expected[-new:].any()


def test_there_are_counts_for_every_call_that_divides_keys() -> None:
    counts = len(arrivals_of("cpu"))
    divided = {choose_splits(batch, 8, 1 << 17, 132) > 1: 8 * batch for batch in range(1, 200)}
    assert all(8 * batch <= counts for batch in range(1, 200) if choose_splits(batch, 8, 1 << 17, 132) > 1)
    assert all(n <= counts for n in range(1, 2000) if choose_division(n, 1 << 17, 256, 132).splits > 1)
    assert divided.keys() == {True, False}
    out = torch.zeros(5, 4, 16)
    with pytest.raises(AssertionError, match="10 programs of a part, 9 counts"):
        KeyParts(out, 2, 10, 2, 8192, torch.zeros(9, dtype=torch.int32))
    assert KeyParts(out, 1, 10, 2, 8192, torch.zeros(9, dtype=torch.int32)).arrivals is None
