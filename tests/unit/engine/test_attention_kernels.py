"""Attention kernels in Triton's interpreter against dense attention in float64, with poison around their input."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from common.engine.ops.decode_attention import decode_triton
from common.engine.ops.ended_programs import MAX_TILES, ended_programs
from common.engine.ops.extend_attention import (
    TileDivision,
    choose_shape,
    divide,
    extend_triton,
    kernel_counts,
)
from common.engine.ops.key_parts import MAX_COMBINED, Division, KeyParts
from common.engine.ops.triton_kernel import tl
from tests.fakes.covering import combinations, every_value
from tests.unit.engine.scattered_cache import BAD_PAGE, Cache

pytestmark = [
    pytest.mark.skipif(tl is None, reason="Triton is not installed"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="compiled kernels are tested in tests/gpu"),
]


def close(actual: Tensor, expected: Tensor) -> None:
    tolerance = 2e-3 if actual.dtype == torch.float16 else 3e-6
    torch.testing.assert_close(actual.double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(
    ("dtype", "page_size", "window", "splits"),
    combinations((torch.float32, torch.float16), (1, 16, 64), (None, 1, 70), (1, 3)),
)
def test_decode(dtype: torch.dtype, page_size: int, window: int | None, splits: int) -> None:
    check_decode(dtype, page_size, window, Division(splits, 64, 2))


@pytest.mark.parametrize(("splits", "window"), every_value((6, 30), (None, 70)))
def test_sums_of_parts(splits: int, window: int | None) -> None:
    """6 parts of 2 rows are added up by the last program, 30 by a kernel; short requests have one."""
    check_decode(torch.float32, 16, window, Division(splits, 16, 2))


def check_decode(dtype: torch.dtype, page_size: int, window: int | None, division: Division) -> None:
    heads, kv_heads, dim = 4, 2, 16
    cache = Cache([1, 64, 65, 150, 3, 200], page_size, kv_heads, dim, dtype)
    lengths = torch.tensor([*cache.lengths, 0], dtype=torch.int32)
    table = torch.cat([cache.page_table, torch.full_like(cache.page_table[:1], BAD_PAGE)])
    query = torch.randn(len(lengths), heads, dim, dtype=dtype)
    query[-1] = torch.nan  # a padding row without length
    key, value = cache.planes
    given = query, key, value, table, lengths, 4096, window, dim**-0.5
    out = decode_triton(*given, division=division)
    for row in range(len(cache.lengths)):
        close(out[row : row + 1], cache.expected(row, query[row : row + 1], window))
    assert not out[-1].any()


def test_counts_of_ended_programs_start_at_zero_again() -> None:
    """Calls of other batches follow each other, each of which counts its programs in the same memory."""
    for lengths in ([90, 17], [200], [150, 64, 129]):
        cache = Cache(lengths, 16, 2, 16, torch.float32)
        query = torch.randn(len(lengths), 4, 16)
        for splits in (5, 3):
            key, value = cache.planes
            ends = torch.tensor(lengths, dtype=torch.int32)
            given = query, key, value, cache.page_table, ends, 4096, None, 0.25
            out = decode_triton(*given, division=Division(splits, 16, 2))
            for row in range(len(lengths)):
                close(out[row : row + 1], cache.expected(row, query[row : row + 1], None))
            assert not ended_programs(out.device).any()


def test_programs_are_counted_only_where_the_last_one_adds_up_the_parts() -> None:
    out = torch.empty(1, 1, 16)

    def is_counted(tiles: int, rows: int, splits: int) -> bool:
        return bool(KeyParts(tiles, rows, Division(splits, 16, 2), 1, None, out).constants["COMBINED"])

    assert is_counted(MAX_TILES, 1, 2)
    assert not is_counted(MAX_TILES + 1, 1, 2), "there are not enough counts"
    assert not is_counted(1, MAX_COMBINED, 2), "the last program would read too much"


def test_more_tiles_than_there_are_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel adds up the parts of a large batch, even if only one of its requests has several."""
    monkeypatch.setattr("common.engine.ops.key_parts.MAX_TILES", 3)
    check_decode(torch.float32, 16, None, Division(1, 16, 2))


def test_a_graph_cannot_own_the_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="before the first graph"):
        ended_programs(torch.device("cuda", 7))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(7, 1, 64), (6, 2, 24), (2, 2, 128), (4, 1, 80), (2, 1, 112)]
)
def test_decode_shapes(heads: int, kv_heads: int, dim: int) -> None:
    cache = Cache([90, 17], 16, kv_heads, dim, torch.float32)
    lengths = torch.tensor(cache.lengths, dtype=torch.int32)
    wide = torch.randn(2, 2 * heads * dim)  # queries are part of a merged row
    query = wide[:, : heads * dim].unflatten(1, (heads, dim))
    out = decode_triton(query, *cache.planes, cache.page_table, lengths, 90, None, dim**-0.5)
    assert out.is_contiguous()
    for row in range(2):
        close(out[row : row + 1], cache.expected(row, query[row : row + 1], None))


def test_tiles_fit_the_work_and_shared_memory() -> None:
    assert [choose_shape(32 * n, 256, 132)[0] for n in (32, 64, 1024, 2048, 8192)] == [16, 64, 64, 128, 128]
    assert choose_shape(1 << 20, 512, 132) == (64, 32, 4)


@pytest.mark.parametrize(
    ("dtype", "page_size", "window"),
    combinations((torch.float32, torch.float16), (1, 16, 64), (None, 1, 70)),
)
def test_extend(dtype: torch.dtype, page_size: int, window: int | None) -> None:
    heads, kv_heads, dim = 4, 2, 16
    lengths, query_lens = [1, 9, 170, 100, 33, 20], [1, 9, 130, 30, 1, 0]
    cache = Cache(lengths, page_size, kv_heads, dim, dtype)
    query = torch.randn(sum(query_lens) + 40, heads, dim, dtype=dtype)
    query[-40:] = torch.nan  # padding after the last request
    starts = torch.tensor([0, *query_lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    ends = torch.tensor(lengths, dtype=torch.int32)
    key, value = cache.planes
    out = extend_triton(
        query, key, value, cache.page_table, starts, ends, window, dim**-0.5, shape=(64, 32, 4), programs=1
    )
    for row, part in enumerate(out[:-40].split(query_lens)):
        if query_lens[row]:
            close(part, cache.expected(row, query[starts[row] : starts[row + 1]], window))
    assert not out[-40:].any()


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(7, 1, 64), (6, 2, 24), (2, 2, 128), (4, 1, 80), (2, 1, 112)]
)
def test_extend_shapes_and_requests_left_to_others(heads: int, kv_heads: int, dim: int) -> None:
    cache = Cache([80, 20, 70], 16, kv_heads, dim, torch.float32)
    wide = torch.randn(140, 2 * heads * dim)  # queries are part of a merged row
    query = wide[:, : heads * dim].unflatten(1, (heads, dim))
    starts = torch.tensor([0, 70, 90, 140], dtype=torch.int32)
    ends = torch.tensor([80, 0, 70], dtype=torch.int32)  # the second request is computed elsewhere
    key, value = cache.planes
    out = extend_triton(query, key, value, cache.page_table, starts, ends, None, dim**-0.5, programs=1)
    close(out[:70], cache.expected(0, query[:70], None))
    close(out[90:], cache.expected(2, query[90:], None))
    assert not out[70:90].any()


@pytest.mark.parametrize("window", [None, 1500])
def test_extend_over_parts_of_the_keys(window: int | None) -> None:
    lengths, query_lens = [2600, 20, 700], [9, 20, 3]
    cache = Cache(lengths, 16, 1, 16, torch.float32)
    query = torch.randn(sum(query_lens) + 20, 3, 16)
    query[-20:] = torch.nan  # padding after the last request
    starts = torch.tensor([0, *query_lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    ends = torch.tensor(lengths, dtype=torch.int32)
    key, value = cache.planes
    rest = cache.page_table, starts, ends, window, 0.25
    for programs in (6, 30):
        out = extend_triton(query, key, value, *rest, shape=(16, 32, 4), programs=programs)
        for row, part in enumerate(out[:-20].split(query_lens)):
            close(part, cache.expected(row, query[starts[row] : starts[row + 1]], window))
        assert not out[-20:].any()
        assert not ended_programs(query.device).any()


@pytest.mark.parametrize("count", [0, 1, 2, 130])
def test_extend_of_few_and_of_no_rows(count: int) -> None:
    cache = Cache([130], 16, 1, 16, torch.float32)
    query = torch.randn(count, 2, 16)
    starts, ends = (torch.tensor(x, dtype=torch.int32) for x in ([0, count], [130]))
    key, value = cache.planes
    out = extend_triton(query, key, value, cache.page_table, starts, ends, None, 0.25, programs=1)
    close(out, cache.expected(0, query, None))


@pytest.mark.parametrize(
    ("heads", "itemsize"),
    [((32, 8, 128), 2), ((28, 4, 128), 2), ((8, 8, 64), 2), ((4, 2, 256), 2), ((4, 2, 64), 4)],
)
def test_every_kernel_is_among_those_that_are_compiled_early(
    heads: tuple[int, int, int], itemsize: int
) -> None:
    cpu = torch.device("cpu")

    def kernel(count: int) -> TileDivision:
        return divide(count, heads, itemsize, cpu)

    for least, most in ((1, 1), (1, 64), (1, 700), (1, 8192), (129, 64), (129, 8192)):
        counts = kernel_counts(least, most, heads, itemsize, cpu)
        assert len({kernel(count) for count in counts}) == len(counts)
        assert {kernel(count) for count in counts} == {kernel(count) for count in range(least, most + 1)}
