"""How prompts are divided among the programs of attention.

The functions run as Python with a few of Triton's operations on tensors of the CPU.
"""

from __future__ import annotations

import math
from types import FunctionType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from common.engine.ops import prompt_pieces
from common.engine.ops.prompt_pieces import FINER, MAX_PARTS, MIN_PART, most_parts, plan_pieces

pytest.importorskip("triton")

TOKENS, BLOCK = 32, 128


class Pointer(NamedTuple):
    """Numbers in memory, and which of them are pointed at."""

    numbers: Tensor
    index: Any = 0

    def __add__(self, index: Any) -> Pointer:
        return self._replace(index=self.index + index)


def load(pointer: Pointer, mask: Tensor | None = None, other: int = 0) -> Any:
    if mask is None:
        return int(pointer.numbers[pointer.index])
    return torch.where(mask, pointer.numbers[torch.where(mask, pointer.index, 0)], other)


def larger(a: Any, b: Any) -> Any:
    return a.clamp(min=b) if isinstance(a, Tensor) else max(a, b)


def smaller(a: Any, b: Any) -> Any:
    return a.minimum(torch.as_tensor(b)) if isinstance(a, Tensor) else min(a, b)


TRITON = SimpleNamespace(
    cdiv=lambda a, b: -(-a // b),
    cumsum=lambda numbers, axis: numbers.cumsum(axis),
    int32=torch.int32,
    load=load,
    max=lambda numbers, axis: int(numbers.max()),
    maximum=larger,
    minimum=smaller,
    sum=lambda numbers, axis: int(numbers.sum()),
    where=torch.where,
)


def as_python(name: str) -> Any:
    """Return a function of the module that calls Triton's operations on tensors of the CPU."""
    names: dict[str, Any] = {"tl": TRITON}
    if name in ("divide_prompts", "find_piece"):
        names |= {called: as_python(called) for called in ("_parts_of", "_average_blocks")}
    return FunctionType(getattr(prompt_pieces, name).fn.__code__, names)


divide_prompts, find_piece = as_python("divide_prompts"), as_python("find_piece")


class Piece(NamedTuple):
    request: int
    start: int
    stop: int
    length: int
    first: int
    kv_head: int
    split: int
    parts: int
    place: int

    @property
    def blocks(self) -> int:
        """The most blocks of keys of the piece."""
        return math.ceil(math.ceil(self.length / BLOCK) / self.parts)


def divide(
    prompts: list[tuple[int, int]], kv_heads: int, programs: int, padding: int = 0, window: int | None = None
) -> list[Piece]:
    """Return the pieces of prompts (new tokens, cached tokens)."""
    starts = torch.tensor([0] + [new for new, _ in prompts]).cumsum(0)
    memory = Pointer(starts), Pointer(torch.tensor([new + cached for new, cached in prompts]))
    sizes = len(prompts), int(starts[-1]) + padding
    shape = window is not None, TOKENS, kv_heads, BLOCK, MIN_PART // BLOCK, MAX_PARTS
    found, count = divide_prompts(torch.arange(128), *memory, *sizes, programs, window or 0, *shape, FINER)
    return [Piece(*find_piece(found, each, *memory, *sizes, window or 0, *shape)) for each in range(count)]


@given(
    prompts=st.lists(st.tuples(st.integers(0, 300), st.integers(0, 40_000)), min_size=1, max_size=12),
    kv_heads=st.sampled_from([1, 2, 8]),
    programs=st.sampled_from([1, 20, 132]),
    padding=st.integers(0, 100),
    window=st.sampled_from([None, 100, 4096]),
)
def test_each_tile_is_computed_once_and_parts_have_places_of_their_own(
    prompts: list[tuple[int, int]], kv_heads: int, programs: int, padding: int, window: int | None
) -> None:
    pieces = divide(prompts, kv_heads, programs, padding, window)
    expected, start = [], 0
    for request, new in enumerate([*(new for new, _ in prompts), padding]):
        firsts = range(start, start + new, TOKENS)
        expected += [(request, first, head) for first in firsts for head in range(kv_heads)]
        start += new
    found = [(each.request, each.first, each.kv_head) for each in pieces if each.split == 0]
    assert sorted(found) == sorted(expected)
    assert len(set(pieces)) == len(pieces) == sum(each.parts for each in pieces if each.split == 0)
    assert all(each.split < each.parts <= MAX_PARTS for each in pieces)
    places = [each.place + each.split for each in pieces if each.parts > 1]
    assert len(set(places)) == len(places)
    assert max(places, default=0) < most_parts(programs)


@pytest.mark.skipif(torch.cuda.is_available(), reason="compiled kernels are tested in tests/gpu")
@pytest.mark.parametrize(
    "prompts", [[(64, 0)], [(70, 9000), (0, 40), (3, 700), (40, 5000)], [(30, 20_000), (30, 100)]]
)
def test_the_kernel_writes_each_piece_and_no_more(prompts: list[tuple[int, int]]) -> None:
    starts = torch.tensor([0] + [new for new, _ in prompts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    lengths = torch.tensor([new + cached for new, cached in prompts], dtype=torch.int32)
    plan = plan_pieces(starts, lengths, int(starts[-1]) + 5, TOKENS, 2, BLOCK, programs=9)
    pieces = divide(prompts, 2, 9, padding=5)[::-1]
    wanted = [
        (each.parts, each.request, each.stop, each.length, each.first, each.kv_head, each.split, each.place)
        for each in pieces
    ]
    assert [tuple(row) for row in plan[: len(pieces)].tolist()] == wanted
    assert len(plan) > len(pieces)
    assert not plan[len(pieces) :, 0].any()


@pytest.mark.parametrize(
    ("prompts", "pieces", "longest"),
    [
        ([(16, 32_752)], 128, 16),
        ([(64, 32_704)], 128, 32),
        ([(300, 32_468)], 240, 86),
        ([(512, 32_256)], 128, 256),
        ([(2048, 0)], 512, 16),
        ([(64, 7936)] * 8, 128, 63),
        ([(64, 29_936), (1984, 0)], 624, 30),
        ([(64, 29_936), (2000, 2000)], 552, 79),
        ([*[(64, 3936)] * 7, (64, 31_936)], 240, 32),
    ],
)
def test_parts_are_as_long_as_the_work_of_a_program(
    prompts: list[tuple[int, int]], pieces: int, longest: int
) -> None:
    """Otherwise a few new tokens after many cached ones would hold up the others."""
    found = divide(prompts, 8, 132)
    assert (len(found), max(each.blocks for each in found)) == (pieces, longest)
