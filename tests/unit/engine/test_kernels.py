"""Element-wise kernels against their torch references, in Triton's interpreter on the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from common.engine.ops.keep_hidden import keep_hidden_reference, keep_hidden_triton
from common.engine.ops.output_norm import (
    add_normed_reference,
    add_normed_rms_norm_reference,
    add_normed_rms_norm_triton,
    add_normed_triton,
)
from common.engine.ops.rms_norm import (
    add_rms_norm_reference,
    add_rms_norm_triton,
    rms_norm_reference,
    rms_norm_triton,
)
from common.engine.ops.rotary import rotary_angles_reference, rotary_angles_triton
from common.engine.ops.rotary_kv_write import (
    rotary_kv_write_reference,
    rotary_kv_write_triton,
    rotary_qk_reference,
    rotary_qk_triton,
)
from common.engine.ops.sigmoid_gate import sigmoid_gate_reference, sigmoid_gate_triton
from common.engine.ops.silu_mul import (
    gelu_mul_reference,
    gelu_mul_triton,
    silu_mul_reference,
    silu_mul_triton,
)
from common.engine.ops.token_norm import token_norm_reference, token_norm_triton
from common.engine.ops.triton_kernel import tl
from common.engine.ops.vocabulary_rows import vocabulary_rows_reference, vocabulary_rows_triton
from common.engine.ops.write_mark import write_mark_reference, write_mark_triton
from tests.fakes.covering import combinations

pytestmark = [
    pytest.mark.skipif(tl is None, reason="Triton is not installed"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="compiled kernels are tested in tests/gpu"),
]
DTYPES = [torch.float32, torch.float16]


def close(actual: Tensor, expected: Tensor) -> None:
    half = expected.dtype == torch.float16
    torch.testing.assert_close(
        actual, expected, atol=2e-3 if half else 2e-6, rtol=2e-3 if half else 1e-5, equal_nan=True
    )


@pytest.mark.parametrize(
    ("dtype", "stored"), [*((dtype, dtype) for dtype in DTYPES), (torch.float16, torch.float32)]
)
@pytest.mark.parametrize("shape", [(3, 64), (2, 3, 48), (0, 16)])
def test_rms_norm(dtype: torch.dtype, stored: torch.dtype, shape: tuple[int, ...]) -> None:
    x, residual = torch.randn(shape, dtype=dtype), torch.randn(shape, dtype=dtype)
    weight = torch.randn(shape[-1], dtype=stored)
    close(rms_norm_triton(x, weight, 1e-5), rms_norm_reference(x, weight, 1e-5))
    normed, total = add_rms_norm_triton(x, residual, weight, 1e-5)
    expected, expected_total = add_rms_norm_reference(x, residual, weight, 1e-5)
    assert torch.equal(total, expected_total)
    close(normed, expected)


@pytest.mark.parametrize("shape", [(1, 96), (17, 2, 128), (3, 1000), (64, 4096)])
def test_one_call_computes_what_transformers_does_in_several(shape: tuple[int, ...]) -> None:
    x, weight = 3 * torch.randn(shape), torch.randn(shape[-1])
    scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    assert torch.equal(rms_norm_reference(x, weight, 1e-6), weight * (x * scale))


def test_a_float32_weight_multiplies_before_the_norm_is_rounded() -> None:
    """A weight of 1 + 2^-11 changes no value that was rounded first, but many that are rounded once."""
    x = torch.randn(64, 32).half()
    weight = torch.full((32,), 1 + 2**-11)
    once = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6) * weight
    for run in (rms_norm_reference, rms_norm_triton):
        assert (run(x, weight, 1e-6) != once.half()).float().mean() < 0.01
        assert (run(x, weight.half(), 1e-6) != once.half()).float().mean() > 0.1


@pytest.mark.parametrize(
    ("dtype", "stored"), [*((dtype, dtype) for dtype in DTYPES), (torch.float16, torch.float32)]
)
@pytest.mark.parametrize("shape", [(3, 64), (2, 3, 40), (0, 16)])
def test_norms_of_outputs(dtype: torch.dtype, stored: torch.dtype, shape: tuple[int, ...]) -> None:
    x, residual = torch.randn(shape, dtype=dtype), torch.randn(shape, dtype=dtype)
    before, after = torch.randn(2, shape[-1], dtype=stored).unbind()
    expected = add_normed_rms_norm_reference(x, residual, before, after, 1e-5)
    for actual, wanted in zip(add_normed_rms_norm_triton(x, residual, before, after, 1e-5), expected):
        assert actual.dtype == dtype
        close(actual, wanted)
    close(
        add_normed_triton(x, residual, before, 1e-5),
        add_normed_reference(x, residual, before, 1e-5),
    )


@pytest.mark.parametrize(
    ("dtype", "stored"), [*((dtype, dtype) for dtype in DTYPES), (torch.float16, torch.float32)]
)
@pytest.mark.parametrize(("queries", "keys"), [(48, 24), (20, 20), (96, 8)])
def test_token_norm(dtype: torch.dtype, stored: torch.dtype, queries: int, keys: int) -> None:
    """Each token's queries have one norm and its keys another; values stay."""
    qkv = torch.randn(3, queries + 2 * keys + 8, dtype=dtype)[:, :-8]
    weights = torch.randn(queries, dtype=stored), torch.randn(keys, dtype=stored)
    expected, actual = qkv.clone(), qkv.clone()
    token_norm_reference(expected, *weights, 1e-5)
    token_norm_triton(actual, *weights, 1e-5)
    close(actual, expected)
    assert torch.equal(actual[:, queries + keys :], qkv[:, queries + keys :])
    with pytest.raises(AssertionError, match="norms of"):
        token_norm_triton(actual[:, :-2], *weights, 1e-5)


def test_rms_norm_of_rows_with_a_stride() -> None:
    x, weight = torch.randn(5, 96)[:, 16:48], torch.randn(32)
    close(rms_norm_triton(x, weight, 1e-6), rms_norm_reference(x, weight, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 64), (1, 2 * 2100), (2, 2, 30)])
def test_silu_mul(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = 3 * torch.randn(shape, dtype=dtype)
    for run, reference in (
        (silu_mul_triton, silu_mul_reference),
        (gelu_mul_triton, gelu_mul_reference),
    ):
        out = run(x)
        assert out.is_contiguous()
        close(out, reference(x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(3, 64), (2, 2100), (0, 16)])
def test_sigmoid_gate(dtype: torch.dtype, rows: int, width: int) -> None:
    """The gate is a part of a merged product's rows."""
    x, merged = torch.randn(rows, width, dtype=dtype), 4 * torch.randn(rows, width + 24, dtype=dtype)
    out = sigmoid_gate_triton(x, merged[:, 24:])
    assert out.is_contiguous()
    close(out, sigmoid_gate_reference(x, merged[:, 24:]))
    with pytest.raises(AssertionError, match="gated by"):
        sigmoid_gate_triton(x, merged)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("count", "head_dim"), [(1, 16), (37, 32), (5, 128), (3, 24)])
def test_rotary_angles(dtype: torch.dtype, count: int, head_dim: int) -> None:
    positions = torch.randint(0, 5000, (count,))
    inv_freq = 10000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
    for actual, expected in zip(
        rotary_angles_triton(positions, inv_freq, 1.25, dtype),
        rotary_angles_reference(positions, inv_freq, 1.25, dtype),
        strict=True,
    ):
        assert actual.shape == (count, 1, head_dim)
        close(actual, expected)


@pytest.mark.parametrize(
    ("dtype", "norm", "page_size", "shape"),
    combinations(DTYPES, (False, True), (1, 16, 64), ((4, 2, 16), (14, 2, 24), (2, 1, 112))),
)
def test_rotary_kv_write(dtype: torch.dtype, norm: bool, page_size: int, shape: tuple[int, int, int]) -> None:
    heads, kv_heads, head_dim = shape
    tokens, pages = 7, 12
    wide = torch.randn(tokens, (heads + 2 * kv_heads) * head_dim + 8, dtype=dtype)  # rows with a stride
    wide[5:] = torch.nan  # padding rows of a poisoned batch
    slots = torch.randperm((pages - 1) * page_size)[: tokens - 1] + page_size
    slots[5] = page_size - 1  # in page 0; the last row has no slot at all
    positions = torch.randint(0, 100, (tokens,))
    inv_freq = 10000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
    cos, sin = rotary_angles_reference(positions, inv_freq, 1.0, dtype)
    weights = (torch.randn(head_dim, dtype=dtype), torch.randn(head_dim, dtype=dtype))
    results = []
    for run in (rotary_kv_write_reference, rotary_kv_write_triton):
        qkv = wide.clone()[:, :-8].unflatten(1, (heads + 2 * kv_heads, head_dim))
        planes = torch.zeros(2, pages, page_size, kv_heads, head_dim, dtype=dtype)
        run(qkv, cos, sin, *(weights if norm else (None, None)), 1e-6, *planes, slots)
        results.append((qkv, planes))
    (expected, expected_planes), (actual, planes) = results
    close(actual, expected)
    close(planes, expected_planes)
    assert not planes[:, 0].any()
    assert int(planes[0].any(-1).any(-1).sum()) == 5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "head_dim"), [(2, 16), (11, 40)])
def test_rotary_qk(dtype: torch.dtype, heads: int, head_dim: int) -> None:
    """Angles have more precision than the rotated values; attention values are unchanged."""
    qkv = torch.randn(5, 3, heads, head_dim, dtype=dtype)
    inv_freq = 10000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
    angles = rotary_angles_reference(torch.arange(5), inv_freq, 1.0, torch.float32)
    expected, actual = qkv.clone(), qkv.clone()
    rotary_qk_reference(expected, *angles)
    rotary_qk_triton(actual, *angles)
    close(actual, expected)
    assert torch.equal(actual[:, 2], qkv[:, 2])
    assert not torch.equal(actual[1:, :2], qkv[1:, :2])


@pytest.mark.parametrize(
    ("dtype", "stored", "sizes"),
    combinations(DTYPES, (None, torch.float16, torch.float32), ((16, 8), (24, 6), (32, 2), (40, 36))),
)
def test_only_the_first_dimensions_of_a_head_are_rotated(
    dtype: torch.dtype, stored: torch.dtype | None, sizes: tuple[int, int]
) -> None:
    """The norm covers the whole head, and the pages get all of it."""
    head_dim, dims = sizes
    stored = dtype if stored == torch.float16 else stored
    tokens, heads, kv_heads = 5, 3, 1
    qkv = torch.randn(tokens, heads + 2 * kv_heads, head_dim, dtype=dtype)
    inv_freq = 10000.0 ** (-torch.arange(0, dims, 2) / dims)
    cos, sin = rotary_angles_reference(torch.arange(3, 3 + tokens), inv_freq, 1.0, dtype)
    weights = (None, None) if stored is None else tuple(torch.randn(2, head_dim, dtype=stored).unbind())
    slots = torch.randperm(8)[:tokens] + 4
    results = []
    for run in (rotary_kv_write_reference, rotary_kv_write_triton):
        ours, planes = qkv.clone(), torch.zeros(2, 3, 4, kv_heads, head_dim, dtype=dtype)
        run(ours, cos, sin, *weights, 1e-6, *planes, slots)
        results.append((ours, planes))
    (expected, expected_planes), (actual, planes) = results
    close(actual, expected)
    close(planes, expected_planes)
    if stored is None:
        assert torch.equal(actual[..., dims:], qkv[..., dims:])
        assert not torch.equal(actual[:, :heads, :dims], qkv[:, :heads, :dims])


def test_the_pages_may_have_another_dtype() -> None:
    qkv = torch.randn(1, 3, 16)
    cos, sin = rotary_angles_reference(torch.tensor([3]), torch.rand(8), 1.0, torch.float32)
    planes = torch.zeros(2, 2, 4, 1, 16, dtype=torch.float16)
    rotary_kv_write_triton(qkv, cos, sin, None, None, 0.0, *planes, torch.tensor([6]))
    assert torch.equal(planes[0, 1, 2], qkv[0, 1:2].half())
    assert torch.equal(planes[1, 1, 2], qkv[0, 2:].half())


def test_a_launcher_refuses_another_layout() -> None:
    with pytest.raises(AssertionError, match="adjacent"):
        rms_norm_triton(torch.randn(8, 4).t(), torch.ones(8), 1e-5)
    with pytest.raises(AssertionError, match="weight"):
        rms_norm_triton(torch.randn(8, 4), torch.ones(8), 1e-5)
    planes = torch.zeros(2, 2, 4, 1, 16)
    qkv = torch.randn(16, 3, 1).permute(2, 1, 0)
    rest = torch.ones(1, 1, 16), torch.ones(1, 1, 16), None, None, 0.0, *planes, torch.tensor([6])
    with pytest.raises(AssertionError, match="heads of a token"):
        rotary_kv_write_triton(qkv, *rest)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("size", "step"), [(64, 0), (30, 1), (1100, 2)])
def test_keep_hidden(dtype: torch.dtype, size: int, step: int) -> None:
    """Row E3: one kernel writes the pool. A request without rows keeps its state, and row 0 may occur twice."""
    lens, starts = torch.tensor([4, 1, 0, -2, 3]), torch.tensor([0, 4, 5, 5, 5])
    rows = torch.tensor([3, 1, 2, 4, 6])
    hidden = torch.randn(9, 2 * size, dtype=dtype)[:8, size:]
    pool = torch.randn(8, 3, size, dtype=dtype)
    expected = pool.clone()
    for request, source in ((0, 3), (1, 4), (4, 7)):
        expected[rows[request], step] = hidden[source]
    for write in (keep_hidden_reference, keep_hidden_triton):
        out = pool.clone()
        write(hidden, rows, out, step, lens, starts)
        assert torch.equal(out, expected)
        write(hidden, rows[:0], out, step, lens[:0], starts[:0])
        write(hidden, torch.tensor([0, 0]), out, step, torch.zeros(2, dtype=torch.int64), starts[:2].clone())
        assert torch.equal(out, expected)


def test_write_mark() -> None:
    for write in (write_mark_reference, write_mark_triton):
        count, seen = torch.tensor([41]), torch.tensor([0])
        for expected in (42, 43):
            write(count, seen)
            assert count.tolist() == seen.tolist() == [expected]


def test_keep_hidden_checks_its_arguments() -> None:
    """A different width or dtype raises: it must not be copied as if it fitted."""
    hidden, rows, pool = torch.zeros(2, 4), torch.zeros(1, dtype=torch.int64), torch.zeros(2, 1, 4)
    for wrong in (
        (hidden[:, :3], rows, pool, 0, rows, rows),
        (hidden.half(), rows, pool, 0, rows, rows),
        (hidden, rows, pool, 1, rows, rows),
        (hidden, rows, pool, 0, rows[:0], rows),
    ):
        with pytest.raises(AssertionError):
            keep_hidden_triton(*wrong)


@pytest.mark.parametrize("size", [48, 1030])
def test_rows_of_a_part_of_the_vocabulary(size: int) -> None:
    """Ids before, in and past the part; the last token of a rank and the first of the next one."""
    weight = torch.randn(7, size)
    ids = torch.tensor([0, 9, 10, 13, 16, 17, 90, 10])
    found = vocabulary_rows_triton(ids, weight, 10)
    assert torch.equal(found, vocabulary_rows_reference(ids, weight, 10))
    column = torch.stack((ids, ids), dim=1)[:, 1]  # its ids are not adjacent
    assert torch.equal(vocabulary_rows_triton(column, weight, 10), found)
    assert torch.equal(found[[2, 3, 4, 7]], weight[[0, 3, 6, 0]])
    assert not found[[0, 1, 5, 6]].any()
    assert vocabulary_rows_triton(ids[:0], weight, 10).shape == (0, size)
