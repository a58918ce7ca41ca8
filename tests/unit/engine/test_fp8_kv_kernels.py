"""Kernels over pages in eight bits, in Triton's interpreter: the values that they store and what they read."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor

from common.engine.ops.decode_attention import decode_attention, decode_reference, decode_triton
from common.engine.ops.extend_attention import extend_attention, extend_triton
from common.engine.ops.fp8_codes import FP8
from common.engine.ops.key_parts import Division
from common.engine.ops.kv_rounding import as_read, as_stored
from common.engine.ops.rotary_decode import rotary_decode_reference, rotary_decode_triton
from common.engine.ops.rotary_kv_write import rotary_kv_write_reference, rotary_kv_write_triton
from common.engine.ops.triton_kernel import tl
from common.engine.ops.verify_attention import verify_attention, verify_reference, verify_triton
from tests.unit.engine.scattered_cache import Cache

needs_interpreter = pytest.mark.skipif(
    tl is None or torch.cuda.is_available(), reason="needs Triton's interpreter; a GPU runs tests/gpu"
)


SCALES = [(1.0, 1.0), (0.25, 2.0)]


def test_rounding_is_exact_for_stored_values_and_bounded() -> None:
    every = torch.arange(256, dtype=torch.uint8).view(FP8)
    finite = every[~every.float().isnan()]
    for scale in (1.0, 0.125, 8.0):
        for dtype in (torch.float32, torch.bfloat16):
            read = as_read(finite, dtype, scale)
            assert torch.equal(as_stored(read, FP8, scale).view(torch.uint8), finite.view(torch.uint8))
    large = torch.tensor([449.0, 1e9, -torch.inf])
    assert as_stored(large, FP8, 1.0).float().tolist() == [448.0, 448.0, -448.0]
    assert as_stored(large[:1], FP8, 2.0).float().item() == 224.0


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual.double(), expected.double(), atol=3e-5, rtol=3e-5)


@needs_interpreter
@pytest.mark.parametrize("spread_from", [0, 256])
def test_attention(spread_from: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kernel and its references, over the same pages; verification with values in both orders."""
    monkeypatch.setattr("common.engine.ops.verify_attention.SPREAD_PROGRAMS", spread_from)
    heads, kv_heads, dim, scale = 4, 2, 16, 0.25
    key_scale, value_scale = scales = 0.25, 2.0
    cache = Cache([65, 9, 40], 16, kv_heads, dim, torch.float32, scales)
    lengths, table = torch.tensor(cache.lengths, dtype=torch.int32), cache.page_table
    keys, values = cache.planes
    scaled = functools.partial(functools.partial, key_scale=key_scale, value_scale=value_scale)

    query, split = torch.randn(3, heads, dim), Division(2, 64, 2)
    for decode in (decode_attention, decode_reference, functools.partial(decode_triton, division=split)):
        out = scaled(decode)(query, keys, values, table, lengths, 65, None, scale)
        for row in range(3):
            close(out[row : row + 1], cache.expected(row, query[row : row + 1], None))

    starts, query = torch.tensor([0, 7, 10, 20], dtype=torch.int32), torch.randn(20, heads, dim)
    for extend in (extend_attention, functools.partial(extend_triton, programs=1)):
        out = scaled(extend)(query, keys, values, table, starts, lengths, 50, scale)
        for row in range(3):
            rows = slice(int(starts[row]), int(starts[row + 1]))
            close(out[rows], cache.expected(row, query[rows], 50))

    chain, query = torch.ones(3, 4, 4, dtype=torch.bool).tril(), torch.randn(12, heads, dim)
    for verify in (verify_attention, verify_reference, functools.partial(verify_triton, division=split)):
        out = scaled(verify)(query, keys, values, table, lengths, chain, 65, None, scale)
        for row in range(3):
            close(out[4 * row : 4 * row + 4], cache.expected(row, query[4 * row : 4 * row + 4], None))


@needs_interpreter
@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("norm", [False, True])
def test_writing(norm: bool, scales: tuple[float, float]) -> None:
    """Kernel and reference store the same bytes and round the new keys and values in place; padding stays."""
    heads, kv_heads, dim = 3, 2, 16
    qkv = 200 * torch.randn(5, heads + 2 * kv_heads, dim)
    cos, sin = torch.randn(5, 1, dim), torch.randn(5, 1, dim)
    weights = (torch.ones(dim), 100 * torch.ones(dim)) if norm else (None, None)
    slots = torch.tensor([9, 3, 17, 0])
    found = []
    for run in (rotary_kv_write_reference, rotary_kv_write_triton):
        mine, planes = qkv.clone(), torch.zeros(2, 5, 4, kv_heads, dim).to(FP8)
        run(mine, cos, sin, weights[0], weights[1], 1e-6, planes[0], planes[1], slots, *scales)
        found.append((mine, planes.view(torch.uint8)))
    (read, stored), (kernel_read, kernel_stored) = found
    torch.testing.assert_close(kernel_read, read, atol=1e-3, rtol=1e-6)
    # A rotated key at the border of two values may be rounded either way.
    assert (kernel_stored != stored).sum() <= 2
    assert not stored[:, 0].any()
    key, value = read[:3, heads:].chunk(2, dim=1)
    flat = stored.view(FP8).view(2, -1, kv_heads, dim)
    for token, slot in ((0, 9), (2, 17)):
        assert torch.equal(as_read(flat[0, slot], torch.float32, scales[0]), key[token])
        assert torch.equal(as_read(flat[1, slot], torch.float32, scales[1]), value[token])
    assert torch.equal(
        value[0], as_read(as_stored(qkv[0, -kv_heads:], FP8, scales[1]), torch.float32, scales[1])
    )


@needs_interpreter
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_round_as_the_reference(dtype: torch.dtype) -> None:
    """All values of e4m3, the borders between two, what lies beside them, small numbers and what is too large."""
    finite = torch.arange(127, dtype=torch.uint8).view(FP8).float()
    borders = (finite[1:] + finite[:-1]) / 2
    beside = torch.cat((torch.nextafter(borders, finite[1:]), torch.nextafter(borders, finite[:-1])))
    every = torch.cat((finite, borders, beside, torch.tensor([1e-30, 449.0, 480.0, 1e9])))
    numbers = torch.cat((every, -every[1:])).to(dtype)
    dim, slots = 16, torch.arange(16, 16 + -(-len(numbers) // 16))
    value = torch.zeros(len(slots) * dim, dtype=dtype)
    value[: len(numbers)] = numbers
    qkv = torch.cat((torch.zeros(len(slots), 2, dim, dtype=dtype), value.view(-1, 1, dim)), dim=1)
    angles = torch.ones(len(slots), 1, dim, dtype=dtype), torch.zeros(len(slots), 1, dim, dtype=dtype)
    found = []
    for run in (rotary_kv_write_reference, rotary_kv_write_triton):
        mine, planes = qkv.clone(), torch.zeros(2, 6, 16, 1, dim).to(FP8)
        run(mine, *angles, None, None, 0.0, planes[0], planes[1], slots)
        found.append((mine[:, 2], planes[1].view(torch.uint8)))
    (read, stored), (kernel_read, kernel_stored) = found
    assert torch.equal(kernel_stored, stored)
    assert torch.equal(kernel_read, read)


@needs_interpreter
@pytest.mark.parametrize("scales", SCALES)
def test_a_decode_step_in_one_launch(scales: tuple[float, float]) -> None:
    heads, kv_heads, dim = 4, 2, 16
    qkv, cos, sin = torch.randn(1, heads + 2 * kv_heads, dim), torch.randn(1, 1, dim), torch.randn(1, 1, dim)
    for length in (1, 65):
        cache = Cache([length], 16, kv_heads, dim, torch.float32, scales)
        last = int(cache.page_table[0, (length - 1) // 16]) * 16 + (length - 1) % 16
        rest = cache.page_table, torch.tensor([length], dtype=torch.int32), 65, None, 0.25
        outs, planes = [], []
        for run in (rotary_decode_reference, rotary_decode_triton):
            mine = cache.planes.clone()
            new = qkv.clone(), cos, sin, None, None, 0.0, torch.tensor([last]), mine[0], mine[1]
            outs.append(run(*new, *rest, key_scale=scales[0], value_scale=scales[1]))
            planes.append(mine.view(torch.uint8))
        close(outs[1], outs[0])
        assert (planes[0] != planes[1]).sum() <= 1
