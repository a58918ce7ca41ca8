"""The tree attention kernel in Triton's interpreter against dense attention in float64, surrounded by poison."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from common.engine.ops.key_parts import Division, choose_division, choose_eight_bits_division
from common.engine.ops.triton_kernel import tl
from common.engine.ops.verify_attention import verify_reference, verify_triton
from tests.unit.engine.scattered_cache import BAD_PAGE, Cache

pytestmark = [
    pytest.mark.skipif(tl is None, reason="Triton is not installed"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="compiled kernels are tested in tests/gpu"),
]
# Parents of the slots; the second tree has no branches, the third no depth.
TREES = [[-1, 0, 0, 1, 1, 3, 5, 2], [-1, 0, 1, 2, 3, 4, 5, 6], [-1, 0, 0, 0, 0, 0, 0, 0]]


def tree_masks(trees: list[list[int]], new: int) -> Tensor:
    """Return mask rows of the last `new` slots, [B, new, W], built by walking up the tree."""
    mask = torch.zeros(len(trees), len(trees[0]), len(trees[0]), dtype=torch.bool)
    for tree, rows in zip(trees, mask, strict=True):
        for node in range(len(tree)):
            above = node
            while above >= 0:
                rows[node, above] = True
                above = tree[above]
    return mask[:, len(trees[0]) - new :]


def visible(cache: Cache, row: int, mask: Tensor, window: int | None) -> Tensor:
    """Return visibility [new, length] by the depths of the tree's slots, from the row's parents."""
    width, length = mask.shape[1], cache.lengths[row]
    depths: list[int] = []
    for parent in TREES[row]:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    prefix = length - width
    stands = torch.cat((torch.arange(prefix), prefix + torch.tensor(depths)))
    seen = torch.cat((torch.ones(len(mask), prefix, dtype=torch.bool), mask), dim=1)
    if window is not None:
        seen &= stands > stands[-len(mask) :, None] - window
    return seen


def expect(out: Tensor, cache: Cache, query: Tensor, masks: Tensor, window: int | None) -> None:
    tolerance = 2e-3 if out.dtype == torch.float16 else 3e-6
    new = masks.shape[1]
    for row, mask in enumerate(masks):
        rows = slice(row * new, (row + 1) * new)
        wanted = cache.attend(row, query[rows], visible(cache, row, mask, window))
        torch.testing.assert_close(out[rows].double(), wanted, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(("dtype", "page_size"), [(torch.float32, 16), (torch.float16, 1)])
@pytest.mark.parametrize("window", [None, 1, 3, 40])
@pytest.mark.parametrize(("new", "splits"), [(8, 1), (8, 3), (8, 4), (3, 2)])  # 4: 64 rows times parts
def test_trees(dtype: torch.dtype, page_size: int, window: int | None, new: int, splits: int) -> None:
    heads, kv_heads, dim = 2, 1, 16
    cache = Cache([8, 90, 21], page_size, kv_heads, dim, dtype)
    masks = tree_masks(TREES, new)
    query = torch.randn(4 * new, heads, dim, dtype=dtype)
    query[-new:] = torch.nan  # a padding row without length
    padded = torch.cat((masks, masks[:1]))
    lengths = torch.tensor([*cache.lengths, 0], dtype=torch.int32)
    table = torch.cat([cache.page_table, torch.full_like(cache.page_table[:1], BAD_PAGE)])
    key, value = cache.planes
    given = query, key, value, table, lengths, padded, 4096, window, dim**-0.5
    out = verify_triton(*given, division=Division(splits, 16, 2))
    expect(out, cache, query, masks, window)
    assert not out[-new:].any()
    reference = verify_reference(
        query[:-new], *cache.planes, cache.page_table, lengths[:-1], masks, 100, window, dim**-0.5
    )
    expect(reference, cache, query, masks, window)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(7, 1, 64), (6, 2, 24), (2, 2, 128), (4, 1, 80), (2, 1, 112)]
)
def test_shapes_and_strides(heads: int, kv_heads: int, dim: int) -> None:
    cache = Cache([150, 17], 16, kv_heads, dim, torch.float32)
    masks = tree_masks(TREES[1:2], 4).expand(2, -1, -1)  # one mask for all requests
    wide = torch.randn(8, 2 * heads * dim)  # queries are part of a merged row
    query = wide[:, : heads * dim].unflatten(1, (heads, dim))
    lengths = torch.tensor(cache.lengths, dtype=torch.int32)
    out = verify_triton(query, *cache.planes, cache.page_table, lengths, masks, 160, None, dim**-0.5)
    assert out.is_contiguous()
    for row in range(2):
        rows = slice(4 * row, 4 * row + 4)
        torch.testing.assert_close(
            out[rows].double(), cache.expected(row, query[rows], None), atol=3e-6, rtol=3e-6
        )


@pytest.mark.parametrize("length", [33, 36, 48])
def test_a_part_of_which_some_rows_see_nothing(length: int) -> None:
    """The last part holds only slots of the tree: it must not count for rows that see none of them."""
    cache = Cache([length], 16, 1, 16, torch.float32)
    masks = tree_masks([TREES[0]], 8)
    query, lengths = torch.randn(8, 2, 16), torch.tensor([length], dtype=torch.int32)
    for splits in (3, 4):
        key, value = cache.planes
        given = query, key, value, cache.page_table, lengths, masks, 64, None, 0.25
        out = verify_triton(*given, division=Division(splits, 16, 2))
        expect(out, cache, query, masks, None)


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("new", [64, 70])  # with and without a bit for each slot
def test_more_rows_and_slots_than_one_tile(new: int, window: int | None) -> None:
    """A chain after 11 tokens, whose rows take two tiles, equals causal attention."""
    heads, kv_heads, dim, length = 2, 1, 16, new + 11
    cache = Cache([length], 16, kv_heads, dim, torch.float32)
    masks = torch.ones(new, new, dtype=torch.bool).tril()[None]
    query, lengths = torch.randn(new, heads, dim), torch.tensor([length], dtype=torch.int32)
    key, value = cache.planes
    given = query, key, value, cache.page_table, lengths, masks, length, window, dim**-0.5
    out = verify_triton(*given, division=Division(2, 32, 2))
    torch.testing.assert_close(out.double(), cache.expected(0, query, window), atol=3e-6, rtol=3e-6)


def test_the_division_follows_only_from_host_bounds() -> None:
    assert choose_division(8, 16, 1 << 17, 256, 132) == (32, 128, 2)
    assert choose_division(8, 16, 100, 256, 132) == (2, 128, 2)
    assert choose_division(128, 16, 8192, 256, 132) == (3, 128, 2)
    assert choose_division(256, 16, 8192, 256, 132) == (1, 128, 2)
    assert choose_division(1024, 16, 8192, 256, 132) == (1, 64, 3)
    assert choose_division(8, 16, 8192, 512, 132) == (32, 64, 2)


def test_many_parts_of_few_rows_take_shorter_steps() -> None:
    """4 requests of 8 KV heads: 12 parts of 4 rows have one program to add them up, of 16 rows a kernel."""
    assert choose_division(32, 4, 8192, 256, 132) == (12, 128, 2)
    assert choose_division(32, 16, 8192, 256, 132) == (12, 64, 3)
    assert choose_division(16, 32, 8192, 256, 132) == (24, 128, 2)
    combined = {
        each: [rows for rows in (4, 8, 16, 32) if Division(each, 64, 2).is_combined(rows)]
        for each in (1, 3, 12)
    }
    assert combined == {1: [4, 8, 16, 32], 3: [4, 8, 16], 12: [4]}


def test_divisions_over_pages_in_eight_bits() -> None:
    """1, 4, 16 and 32 requests of 8 KV heads and 1,152 keys were measured; 64 take the division of wider pages."""
    measured = {8: (18, 64, 5), 32: (8, 64, 4), 128: (3, 64, 5), 256: (1, 128, 3), 512: (1, 64, 3)}
    for programs, division in measured.items():
        assert choose_eight_bits_division(programs, 16, 1152, 256, 132) == division
    assert choose_eight_bits_division(8, 16, 1 << 17, 256, 132) == (32, 64, 5)
    assert choose_eight_bits_division(128, 16, 64, 256, 132) == (1, 64, 5)
    assert choose_eight_bits_division(8, 16, 8192, 512, 132) == choose_division(8, 16, 8192, 512, 132)


def test_a_launcher_refuses_another_layout() -> None:
    cache = Cache([20], 16, 1, 16, torch.float32)
    lengths, masks = torch.tensor([20], dtype=torch.int32), tree_masks(TREES[:1], 8)
    query = torch.randn(8, 2, 16)
    with pytest.raises(AssertionError, match="cannot hold 8 new tokens"):
        verify_triton(query, *cache.planes, cache.page_table, lengths, masks[:, :, :4], 20, None, 0.25)
    with pytest.raises(AssertionError, match="7 rows for 1 requests"):
        verify_triton(query[:7], *cache.planes, cache.page_table, lengths, masks, 20, None, 0.25)
    with pytest.raises(AssertionError, match="adjacent"):
        verify_triton(query, *cache.planes, cache.page_table, lengths, masks.mT, 20, None, 0.25)
