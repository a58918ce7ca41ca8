"""Pages in FP8 that are converted once: the kernel in Triton's interpreter, and attention over the result."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from common.engine.attention.paged import (
    CONVERTED_BYTES,
    CONVERTED_TOKENS,
    PagedAttention,
    pages_to_convert,
)
from common.engine.forward.batch import ForwardBatch, ForwardMode
from common.engine.ops.extend_attention import extend_reference
from common.engine.ops.fp8_codes import FP8
from common.engine.ops.page_values import page_values, page_values_reference, page_values_triton
from common.engine.ops.triton_kernel import tl
from common.kv_cache.kv_values import KvValues
from common.kv_cache.pool_spec import PoolSpec
from tests.fakes.pools import attention_planes, empty_pool
from tests.unit.engine.scattered_cache import Cache

SCALES = 0.25, 2.0
LONG = CONVERTED_TOKENS + 1

needs_interpreter = pytest.mark.skipif(
    tl is None or torch.cuda.is_available(), reason="needs Triton's interpreter; a GPU runs tests/gpu"
)


@needs_interpreter
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", [(16, 2, 8), (16, 8, 40)])
def test_kernel(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """A page has less than a program's share, or a share and a part."""
    keys, values = ((torch.randn(7, *shape) * 20).to(FP8) for _ in range(2))
    pages = torch.tensor([5, 0, 3], dtype=torch.int32)
    given = keys, values, pages, 0.25, 2.0, dtype
    assert torch.equal(page_values_triton(*given), page_values_reference(*given))
    assert page_values_triton(keys, values, pages[:0], 1.0, 1.0, dtype).shape == (2, 0, *shape)


def test_attention_over_converted_pages() -> None:
    """Pages of the result are in the order of the request."""
    keys, values = ((torch.randn(6, 4, 2, 8)).to(FP8) for _ in range(2))
    query, table = torch.randn(5, 4, 8), torch.tensor([[4, 1, 3]], dtype=torch.int32)
    where = torch.tensor([0, 5], dtype=torch.int32), torch.tensor([11], dtype=torch.int32)
    expected = extend_reference(query, keys, values, table, *where, None, 0.3, 0.5, 2.0)
    key, value = page_values(keys, values, table[0], 0.5, 2.0, query.dtype)
    order = torch.arange(3, dtype=torch.int32)[None]
    found = extend_reference(query, key, value, order, *where, None, 0.3)
    torch.testing.assert_close(found, expected)


def batch_of(new: tuple[int, ...], total: tuple[int, ...], table: Tensor) -> ForwardBatch:
    starts = torch.tensor([0, *new], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    ids = torch.zeros(sum(new), dtype=torch.int64)
    lengths = torch.tensor(total, dtype=torch.int32)
    rest = {"query_lens_host": new, "seq_lens_host": total, "max_seq_len": max(total)}
    return ForwardBatch(ForwardMode.EXTEND, ids, ids, ids, table, lengths, starts, ids[:0], **rest)  # type: ignore[arg-type]


@pytest.mark.parametrize("window", [None, 100])
def test_a_long_chunk_attends_as_over_its_pages(window: int | None) -> None:
    """Page ids past the request's pages are invalid, and so are values past its length."""
    cache = Cache([LONG + 40], 16, 2, 16, torch.float32, SCALES)
    values = KvValues("float8_e4m3fn", {(0, "k"): SCALES[0], (0, "v"): SCALES[1]})
    stored = tuple(values.stored(plane) for plane in attention_planes("target", 1, 2, 16, "float32"))
    pool = empty_pool(PoolSpec(16, stored), cache.planes.shape[1], torch.device("cpu"))
    for mine, plane in zip((pool.key(0), pool.value(0)), cache.planes, strict=True):
        mine.view(torch.uint8).copy_(plane.view(torch.uint8))
    attention, query = PagedAttention(pool, [window]), torch.randn(LONG, 4, 16)
    batch = batch_of((LONG,), (LONG + 40,), cache.page_table)
    attention.plan(batch)
    found = attention.forward(0, query, query, query)
    where = batch.page_table, batch.query_start, batch.seq_lens
    expected = extend_reference(query, cache.planes[0], cache.planes[1], *where, window, 0.25, *SCALES)
    assert torch.equal(found, expected)
    torch.testing.assert_close(found.double(), cache.expected(0, query, window), atol=3e-5, rtol=3e-5)


def test_only_single_long_chunks_are_converted_and_memory_is_bounded() -> None:
    """A page has 16 tokens of 8 heads of 128: 65,536 tokens in bf16 are CONVERTED_BYTES."""
    plane = torch.empty(1, 16, 8, 128, dtype=FP8)
    table = torch.zeros(2, 5000, dtype=torch.int32)

    def pages(new: tuple[int, ...], total: tuple[int, ...], plane: Tensor = plane) -> int | None:
        found = pages_to_convert(batch_of(new, total, table), plane, torch.bfloat16)
        return None if found is None else len(found)

    assert pages((LONG,), (LONG,)) == 33
    assert pages((LONG - 1,), (LONG - 1,)) is None
    assert pages((LONG, 1), (LONG, 1)) is None
    assert pages((LONG,), (LONG,), plane.to(torch.bfloat16)) is None
    most = pages((LONG,), (65536,))
    assert most is not None
    assert 2 * most * plane.numel() * 2 == CONVERTED_BYTES
    assert pages((LONG,), (65537,)) is None
