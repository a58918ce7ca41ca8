"""FP8 pages that are converted once for all tiles of queries: the kernels in Triton's interpreter, and attention."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from common.engine.attention.paged import PagedAttention
from common.engine.forward.batch import ForwardBatch, ForwardMode
from common.engine.ops import converted_attention as conversion
from common.engine.ops import converted_pages as pages
from common.engine.ops.converted_attention import (
    CONVERTED_BYTES,
    MIN_BATCH_TOKENS,
    converted_attention,
    converted_attention_cuda,
    converts,
    room_for_pages,
)
from common.engine.ops.converted_pages import (
    ConvertedPages,
    converted_pages_reference,
    converted_pages_triton,
)
from common.engine.ops.extend_attention import extend_reference, extend_triton
from common.engine.ops.fp8_codes import FP8
from common.engine.ops.triton_kernel import cdiv, tl
from common.kv_cache.kv_values import KvValues
from common.kv_cache.pool_spec import PoolSpec
from tests.fakes.pools import attention_planes, empty_pool
from tests.unit.engine.scattered_cache import Cache

SCALES = 0.25, 2.0
LONG = MIN_BATCH_TOKENS + 1

needs_interpreter = pytest.mark.skipif(
    tl is None or torch.cuda.is_available(), reason="needs Triton's interpreter; a GPU runs tests/gpu"
)


@pytest.fixture(autouse=True)
def short_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests with more than two new tokens are converted."""
    monkeypatch.setattr(pages, "MIN_TOKENS", 2)


def batch_of(new: list[int], cached: list[int], page_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return page table, starts and lengths. Entries past a request's pages are invalid."""
    lengths = torch.tensor([n + c for n, c in zip(new, cached, strict=True)], dtype=torch.int32)
    table = torch.full((len(new), 8), 1 << 30, dtype=torch.int32)
    order, used = torch.randperm(40, dtype=torch.int32), 0
    for row, length in enumerate(lengths.tolist()):
        count = cdiv(length, page_size)
        table[row, :count] = order[used : used + count]
        used += count
    return table, torch.tensor([0, *new], dtype=torch.int32).cumsum(0, dtype=torch.int32), lengths


def same(found: ConvertedPages, expected: ConvertedPages, page_size: int) -> None:
    """Compare what is defined."""
    assert torch.equal(found.converted, expected.converted)
    assert torch.equal(found.others, expected.others)
    used = 0
    for row, length in enumerate(expected.converted.tolist()):
        count = cdiv(length, page_size)
        assert torch.equal(found.page_table[row, :count], expected.page_table[row, :count])
        used += count
    assert torch.equal(found.keys[:used], expected.keys[:used])
    assert torch.equal(found.values[:used], expected.values[:used])


@needs_interpreter
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", [(4, 2, 8), (4, 25, 41)])
@pytest.mark.parametrize("capacity", [0, 4, 6, 40])
def test_kernel(shape: tuple[int, int, int], dtype: torch.dtype, capacity: int) -> None:
    """A page has less than a program's block, or a block and a part."""
    keys, values = ((torch.randn(40, *shape) * 20).to(FP8) for _ in range(2))
    batch = batch_of([5, 2, 0, 9, 3], [0, 30, 7, 6, 1], shape[0])
    asked = keys, values, *batch, 0.25, 2.0, dtype, capacity
    expected = converted_pages_reference(*asked)
    assert [bool(each) for each in expected.converted] == [
        capacity >= 2, False, False, capacity >= 6, capacity >= 7
    ]  # fmt: skip
    same(converted_pages_triton(*asked), expected, shape[0])


@needs_interpreter
@pytest.mark.parametrize("requests", [64, 65, 130])
def test_as_many_requests_as_a_program_reads_and_more(requests: int) -> None:
    """Each has one page, and there is none for the last one."""
    keys, values = (torch.randn(requests, 4, 2, 8).to(FP8) for _ in range(2))
    starts = torch.arange(0, 3 * requests + 1, 3, dtype=torch.int32)
    table = torch.randperm(requests, dtype=torch.int32)[:, None].contiguous()
    asked = keys, values, table, starts, torch.full((requests,), 3, dtype=torch.int32)
    rest = 0.5, 2.0, torch.float32, requests - 1
    expected = converted_pages_reference(*asked, *rest)
    assert expected.others.tolist() == [0] * (requests - 1) + [3]
    same(converted_pages_triton(*asked, *rest), expected, 4)


@needs_interpreter
@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 6), st.integers(0, 20)), min_size=1, max_size=5),
    st.integers(0, 20),
)
def test_any_batch(requests: list[tuple[int, int]], capacity: int) -> None:
    new, cached = [each[0] for each in requests], [each[1] for each in requests]
    keys, values = (torch.randn(40, 4, 2, 8).to(FP8) for _ in range(2))
    asked = keys, values, *batch_of(new, cached, 4), 0.5, 2.0, torch.float32, capacity
    expected = converted_pages_reference(*asked)
    same(converted_pages_triton(*asked), expected, 4)
    where = torch.stack([expected.converted, expected.others])
    assert torch.equal(where.sum(0), asked[4])
    assert sum(cdiv(each, 4) for each in expected.converted.tolist()) <= capacity


@needs_interpreter
@pytest.mark.parametrize("room", [0, 5, 100])
def test_attention_over_both_kinds_of_pages(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some requests have too few new tokens, or find no room, and read FP8 pages. Rows past the last are padding."""
    monkeypatch.setattr(conversion, "room_for_pages", lambda *_: room)
    new, cached = [5, 2, 0, 9, 3], [0, 12, 7, 6, 1]
    table, starts, lengths = batch_of(new, cached, 4)
    keys, values = (torch.randn(40, 4, 2, 16).to(FP8) for _ in range(2))
    query = torch.randn(sum(new) + 3, 4, 16)
    found = converted_attention_cuda(query, keys, values, table, starts, lengths, 0.3, *SCALES)
    expected = extend_reference(query, keys, values, table, starts, lengths, None, 0.3, *SCALES)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)
    assert not found[sum(new) :].any()


@pytest.mark.parametrize(
    ("lengths", "reason"),
    [
        (torch.zeros(4, dtype=torch.int32)[::2], "lengths must be contiguous"),
        (torch.zeros(3, dtype=torch.int32), "3 lengths for 2 requests"),
    ],
)
def test_lengths_that_the_kernel_would_misread_are_refused(lengths: Tensor, reason: str) -> None:
    table, starts, _ = batch_of([5, 2], [0, 12], 4)
    plane = torch.zeros(40, 4, 2, 16).to(FP8)
    with pytest.raises(AssertionError, match=reason):
        converted_pages_triton(plane, plane, table, starts, lengths, *SCALES, torch.float32, 8)


@pytest.mark.parametrize(
    "out",
    [torch.zeros(7, 4, 32)[..., ::2], torch.zeros(6, 4, 16), torch.zeros(7, 4, 16, dtype=torch.float16)],
)
def test_a_result_that_the_kernel_would_miswrite_is_refused(out: Tensor) -> None:
    table, starts, lengths = batch_of([5, 2], [0, 12], 4)
    plane = torch.zeros(40, 4, 2, 16).to(FP8)
    with pytest.raises(AssertionError, match="the result must be"):
        extend_triton(
            torch.zeros(7, 4, 16), plane, plane, table, starts, lengths, None, 0.3, *SCALES, out=out
        )


def test_the_reference_attends_over_fp8_pages() -> None:
    table, starts, lengths = batch_of([5, 2], [0, 12], 4)
    keys, values = (torch.randn(40, 4, 2, 16).to(FP8) for _ in range(2))
    query = torch.randn(7, 4, 16)
    found = converted_attention(query, keys, values, table, starts, lengths, 0.3, *SCALES)
    assert torch.equal(
        found, extend_reference(query, keys, values, table, starts, lengths, None, 0.3, *SCALES)
    )


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
    lengths = torch.tensor([LONG + 40], dtype=torch.int32)
    starts, ids = torch.tensor([0, LONG], dtype=torch.int32), torch.zeros(LONG, dtype=torch.int64)
    where = cache.page_table, lengths, starts, ids[:0]
    rest = {"query_lens_host": (LONG,), "seq_lens_host": (LONG + 40,), "max_seq_len": LONG + 40}
    attention.plan(ForwardBatch(ForwardMode.EXTEND, ids, ids, ids, *where, **rest))  # type: ignore[arg-type]
    found = attention.forward(0, query, query, query)
    expected = extend_reference(
        query, cache.planes[0], cache.planes[1], cache.page_table, starts, lengths, window, 0.25, *SCALES
    )
    assert torch.equal(found, expected)
    torch.testing.assert_close(found.double(), cache.expected(0, query, window), atol=3e-5, rtol=3e-5)


def test_long_batches_without_a_window_are_converted_and_memory_is_bounded() -> None:
    """A page has 16 tokens of 8 heads of 128: 65,536 tokens in bf16 are CONVERTED_BYTES."""
    plane = torch.empty(1, 16, 8, 128, dtype=FP8)
    assert converts(LONG, plane, None)
    assert not converts(LONG - 1, plane, None)
    assert not converts(LONG, plane, 4096)
    assert not converts(LONG, plane.to(torch.bfloat16), None)
    page, table = plane.shape[1:], torch.zeros(2, 5000, dtype=torch.int32)
    most = room_for_pages(page, table, torch.bfloat16)
    assert 2 * most * plane.numel() * 2 == CONVERTED_BYTES
    assert most * 16 == 65536
    assert room_for_pages(page, table[:, :200], torch.bfloat16) == 400
