"""Tiles as measured on an H200, and reduced until they fit GPUs with less shared memory."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from common.engine.ops import decode_attention, extend_attention, linear, linear_norm, verify_attention
from common.engine.ops.extend_attention import SHAPES, WIDE_SHAPE
from common.engine.ops.key_parts import choose_division
from common.engine.ops.shared_memory import (
    H200,
    SharedMemory,
    attention_bytes,
    cut_attention,
    room_of,
)
from common.engine.ops.tiles import Tiles, choose_gated_tiles, choose_tiles, divide_depth
from common.engine.ops.triton_kernel import tl
from tests.unit.engine.scattered_cache import Cache

A100, RTX = SharedMemory(163 << 10, False), SharedMemory(99 << 10, False)
B200, TURING = H200, SharedMemory(64 << 10, True)
interpreted = pytest.mark.skipif(
    tl is None or torch.cuda.is_available(), reason="Triton's interpreter is for machines without a GPU"
)


def test_shared_memory_is_known_for_each_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert room_of(torch.device("cpu")) == H200
    found = {
        0: SimpleNamespace(major=9, shared_memory_per_block_optin=227 << 10),
        1: SimpleNamespace(major=8, shared_memory_per_block_optin=163 << 10),
        2: SimpleNamespace(major=12, shared_memory_per_block_optin=99 << 10),
    }
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found[device.index])
    rooms = [room_of.__wrapped__(torch.device("cuda", index)) for index in found]
    assert rooms == [H200, A100, RTX]


def attention_tiles() -> list[tuple[int, int, int, int, int]]:
    """Return (rows, keys, stages, head_dim, itemsize) of all choices."""
    found = []
    for dim, itemsize in itertools.product((64, 80, 96, 128, 256), (2, 4)):
        divisions = {choose_division(programs, 16, 8192, dim * itemsize, 132) for programs in (8, 4096)}
        found += [
            (rows, each.keys, each.stages, dim, itemsize) for each in divisions for rows in (16, 32, 64)
        ]
        shapes = [WIDE_SHAPE] if dim * itemsize > 256 else [shape[:3] for shape in SHAPES]
        found += [(rows, keys, 3 if keys == 64 else 2, dim, itemsize) for rows, keys, _ in shapes]
    return found


def product_tiles(processors: int, shared: int) -> list[tuple[Tiles, int]]:
    """Return tiles, and the number of matrices that each program multiplies, for 1 to 128 rows."""
    chosen: list[tuple[Tiles | None, int]] = []
    for rows in (1, 16, 17, 32, 48, 64, 128):
        chosen += [(choose_tiles(rows, size, processors, shared), 1) for size in (6144, 16384, 151936)]
        chosen += [(choose_gated_tiles(rows, size, processors, shared), 2) for size in (28672, 49152, 73728)]
        for size, depth in ((4096, 4096), (4096, 14336), (1024, 3072), (3584, 18944), (3072, 24576)):
            chosen.append((divide_depth(rows, size, depth, processors, shared), 1))
    return [(tiles, matrices) for tiles, matrices in chosen if tiles is not None]


def test_nothing_is_cut_on_an_h200() -> None:
    for tile in attention_tiles():
        assert cut_attention(*tile, H200) == tile[:2]
    tiles = {
        (each.columns, each.depth, each.stages, each.rows, matrices)
        for each, matrices in product_tiles(132, H200.shared_bytes)
    }
    alone = {(64, 128, 6, 16, 1), (64, 128, 6, 32, 1), (64, 128, 6, 64, 1), (64, 128, 4, 128, 1)}
    sharing = {(64, 128, 4, 16, 1), (64, 128, 4, 32, 1), (64, 128, 3, 64, 1)}
    gated = {(64, 128, 4, 16, 2), (64, 128, 4, 32, 2), (64, 128, 4, 64, 2), (128, 64, 4, 128, 2)}
    assert tiles == alone | sharing | gated


@pytest.mark.parametrize("room", [A100, RTX, B200, TURING])
def test_what_is_chosen_fits(room: SharedMemory) -> None:
    for rows, keys, stages, dim, itemsize in attention_tiles():
        fewer_rows, fewer_keys = cut_attention(rows, keys, stages, dim, itemsize, room)
        assert attention_bytes(fewer_rows, fewer_keys, stages, dim, itemsize, room) <= room.shared_bytes
        assert min(fewer_rows, fewer_keys) >= 16
    for processors in (40, 72, 108, 148, 170):
        tiles = product_tiles(processors, room.shared_bytes)
        assert any(matrices == 2 for _, matrices in tiles)
        for each, matrices in tiles:
            assert each.shared_bytes(matrices) <= room.shared_bytes
            assert each.stages >= 3
            assert each.depth in (64, 128)


def test_16_bits_and_heads_of_128_are_as_on_an_h200_everywhere() -> None:
    """Measured tiles are kept wherever they fit the GPU at hand."""
    for room in (A100, RTX):
        for rows, keys in ((16, 128), (64, 128), (128, 128)):
            assert cut_attention(rows, keys, 2, 128, 2, room) == (rows, keys)
    assert cut_attention(64, 64, 2, 256, 2, RTX) == (64, 32)
    assert cut_attention(64, 64, 2, 256, 4, RTX) == (16, 32)
    assert cut_attention(16, 64, 2, 256, 4, RTX) == (16, 32)
    assert cut_attention(128, 128, 2, 64, 4, RTX) == (128, 64)


def test_rows_that_stay_together_are_not_cut() -> None:
    assert cut_attention(32, 64, 2, 256, 4, RTX, min_rows=32) == (32, 16)
    with pytest.raises(
        RuntimeError, match="heads of 512 numbers of 4 bytes, 64 queries .* load the model in 16 bits"
    ):
        cut_attention(64, 64, 2, 512, 4, RTX, min_rows=64)


def test_products_have_shorter_steps_or_are_left_to_the_library() -> None:
    wide = Tiles(64, 128, 4, 6, rows=64)
    assert wide.with_stages(6, A100.shared_bytes) == wide._replace(stages=5)
    assert wide.with_stages(6, RTX.shared_bytes) == wide._replace(stages=3)
    assert wide.with_stages(4, RTX.shared_bytes // 2) is None
    fewer = wide._replace(rows=32)
    assert fewer.with_stages(4, RTX.shared_bytes // 2) == fewer._replace(depth=64, stages=3)
    assert wide.with_stages(6, 48 << 10) is None
    for rows in (64, 128):
        assert choose_gated_tiles(rows, 28672, 112, A100.shared_bytes) is not None
        assert (choose_gated_tiles(rows, 28672, 112, RTX.shared_bytes) is None) == (rows == 128)


@interpreted
@pytest.mark.parametrize("kind", ["decode", "extend", "verify"])
def test_attention_of_cut_tiles(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """10 KB hold 16 rows and 16 keys of heads of 32 floats; 8 KB do not."""
    lengths, dim, new = [50, 33], 32, 1 if kind == "decode" else 10
    cache = Cache(lengths, 16, 2, dim, torch.float32)
    query, ends = torch.randn(2 * new, 8, dim), torch.tensor(lengths, dtype=torch.int32)
    module = {"decode": decode_attention, "extend": extend_attention, "verify": verify_attention}[kind]

    def attend() -> Tensor:
        key, value = cache.planes
        pages, scale = (key, value, cache.page_table), dim**-0.5
        if kind == "decode":
            return decode_attention.decode_triton(query, *pages, ends, 50, None, scale)
        if kind == "verify":
            chain = torch.ones(2, new, new, dtype=torch.bool).tril()
            return verify_attention.verify_triton(query, *pages, ends, chain, 50, None, scale)
        starts = torch.tensor([0, new, 2 * new], dtype=torch.int32)
        return extend_attention.extend_triton(query, *pages, starts, ends, None, scale, shape=(64, 64, 4))

    monkeypatch.setattr(module, "room_of", lambda device: SharedMemory(10 << 10, False))
    out = attend()
    for row in range(2):
        rows = slice(row * new, (row + 1) * new)
        expected = cache.expected(row, query[rows], None)
        torch.testing.assert_close(out[rows].double(), expected, atol=3e-6, rtol=3e-6)
    monkeypatch.setattr(module, "room_of", lambda device: SharedMemory(8 << 10, False))
    with pytest.raises(RuntimeError, match="does not fit the 8192 bytes"):
        attend()


@interpreted
@pytest.mark.parametrize(
    ("shared_bytes", "taken"), [(227 << 10, (128, 6)), (50 << 10, (64, 4)), (16 << 10, None)]
)
def test_a_product_of_what_fits(
    shared_bytes: int, taken: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launch is that of a GPU with two processors."""
    x, weight = torch.randn(3, 2104).half(), torch.randn(40, 2104).half() / 45
    residual, gain = torch.randn(3, 40).half(), torch.ones(40).half()
    launched: list[tuple[int, int]] = []

    def parts(x: Tensor, weight: Tensor, bias: Tensor | None, tiles: Tiles) -> Tensor:
        launched.append((tiles.depth, tiles.stages))
        return linear.linear_parts(x, weight, bias, tiles)

    monkeypatch.setattr(linear_norm, "linear_parts", parts)
    monkeypatch.setattr(linear_norm, "multiprocessors", lambda device: 2)
    monkeypatch.setattr(linear_norm, "room_of", lambda device: SharedMemory(shared_bytes, False))
    normed, total = linear_norm.linear_add_rms_norm_cuda(x, weight, None, residual, gain, 1e-5)
    assert launched == ([] if taken is None else [taken])
    expected = linear_norm.linear_add_rms_norm_reference(x, weight, None, residual, gain, 1e-5)
    torch.testing.assert_close((normed, total), expected, atol=4e-3, rtol=4e-3)
