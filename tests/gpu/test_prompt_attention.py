"""Attention of prompts over pages, compared with the reference in float32; what must not be read is NaN."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from common.engine.ops import converted_attention as conversion
from common.engine.ops.converted_attention import converted_attention
from common.engine.ops.ended_programs import ended_programs
from common.engine.ops.extend_attention import extend_attention, extend_reference, extend_triton
from common.engine.ops.fp8_codes import FP8
from common.engine.ops.hopper_attention import hopper_extend, hopper_serves
from common.engine.ops.triton_kernel import is_hopper

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(240),
]
BF16, FP16 = torch.bfloat16, torch.float16
BAD_PAGE = 2**31 - 1
FP8_SCALES = 0.5, 2.0
TOLERANCE = {BF16: 1.6e-2, FP16: 3e-3}


class Prompts:
    """Requests of `lengths` tokens, of which `new` are computed, with NaN wherever a kernel must not read."""

    def __init__(
        self,
        lengths: list[int],
        new: list[int],
        heads: tuple[int, int, int],
        page_size: int,
        dtype: torch.dtype,
        rows: int = 0,
        padding: int = 0,
    ) -> None:
        """Make the requests.

        Args:
            heads: query heads, KV heads, head_dim.
            rows: of the page table; those after the requests have no tokens.
            padding: tokens after the last request.
        """
        generator = torch.Generator("cuda").manual_seed(1)
        count, kv_heads, head_dim = heads
        needed = [-(-length // page_size) for length in lengths]
        pages = torch.randperm(sum(needed) + 7, generator=torch.Generator().manual_seed(2)) + 1
        shape = (len(pages) + 1, page_size, kv_heads, head_dim)
        self.planes = [torch.randn(shape, device="cuda", generator=generator).to(dtype) for _ in range(2)]
        rows = max(rows, len(lengths))
        table = torch.full((rows, max(needed) + 2), BAD_PAGE, dtype=torch.int32)
        first = 0
        for row, (length, taken) in enumerate(zip(lengths, needed, strict=True)):
            table[row, :taken] = pages[first : first + taken]
            first += taken
            for plane in self.planes:
                plane[0] = torch.nan
                if length % page_size:
                    plane[pages[first - 1], length % page_size :] = torch.nan
        self.table = table.cuda()
        starts = [0, *torch.tensor(new).cumsum(0).tolist()]
        starts += [starts[-1]] * (rows - len(new))
        self.starts = torch.tensor(starts, dtype=torch.int32, device="cuda")
        self.lengths = torch.tensor(lengths + [0] * (rows - len(lengths)), dtype=torch.int32, device="cuda")
        size = (sum(new) + padding, count, head_dim)
        self.query = torch.randn(size, device="cuda", generator=generator).to(dtype)
        self.query[sum(new) :] = torch.nan
        self.scale = head_dim**-0.5

    def expected(self) -> torch.Tensor:
        query, keys, values = (tensor.float() for tensor in (self.query, *self.planes))
        rest = self.table, self.starts, self.lengths, None, self.scale
        return extend_reference(query, keys, values, *rest)

    def in_fp8(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the planes in e4m3, to be multiplied by FP8_SCALES."""
        keys, values = (plane.float() for plane in self.planes)
        return (keys / FP8_SCALES[0]).to(FP8), (values / FP8_SCALES[1]).to(FP8)

    def expected_in_fp8(self) -> torch.Tensor:
        keys, values = self.in_fp8()
        rest = self.table, self.starts, self.lengths, None, self.scale, *FP8_SCALES
        return extend_reference(self.query.float(), keys, values, *rest)

    def computed(self, hopper: bool, divided: bool) -> torch.Tensor:
        keys, values = self.planes
        rest, programs = (self.table, self.starts, self.lengths), None if divided else 1
        if hopper:
            assert hopper_serves(self.query, keys, None, (1.0, 1.0))
            return hopper_extend(self.query, keys, values, *rest, self.scale, programs=programs).float()
        return extend_triton(self.query, keys, values, *rest, None, self.scale, programs=programs).float()


@pytest.mark.parametrize("divided", [False, True])
@pytest.mark.parametrize("hopper", [True, False])
@pytest.mark.parametrize(
    ("lengths", "new", "heads", "page_size", "dtype", "rows", "padding"),
    [
        ([64], [64], (32, 8, 128), 16, BF16, 64, 64),
        ([1000, 333, 2000], [200, 333, 1], (32, 8, 128), 16, BF16, 64, 5),
        ([5003, 7], [33, 7], (32, 8, 128), 16, BF16, 64, 24),
        ([3000], [2048], (32, 8, 128), 16, BF16, 1, 0),
        ([50] * 70, [3] * 70, (32, 8, 128), 16, BF16, 1, 0),
        ([0, 300], [100, 300], (32, 8, 128), 16, BF16, 1, 10),
        ([1500, 90], [1300, 33], (28, 4, 128), 16, BF16, 1, 0),
        ([4900, 777], [50, 7], (16, 16, 64), 32, FP16, 1, 3),
        ([900], [50], (32, 4, 128), 128, FP16, 1, 0),
        ([6005], [100], (16, 2, 256), 16, BF16, 64, 28),
        ([2000], [300], (8, 8, 256), 8, BF16, 1, 0),
        ([700, 30_000, 900], [700, 40, 800], (32, 8, 128), 16, BF16, 64, 20),
        ([9000, 200, 100, 17_000], [5, 200, 100, 70], (8, 2, 128), 16, BF16, 8, 0),
        ([12_000] + [500] * 30, [16] + [20] * 30, (16, 2, 256), 16, BF16, 32, 0),
    ],
)
def test_prompts(
    lengths: list[int],
    new: list[int],
    heads: tuple[int, int, int],
    page_size: int,
    dtype: torch.dtype,
    rows: int,
    padding: int,
    hopper: bool,
    divided: bool,
) -> None:
    if hopper and not is_hopper(torch.device("cuda")):
        pytest.skip("needs a Hopper GPU")
    prompts = Prompts(lengths, new, heads, page_size, dtype, rows, padding)
    expected = prompts.expected()
    for _ in range(2):  # the counts of the first call must be zero again
        torch.testing.assert_close(prompts.computed(hopper, divided), expected, atol=TOLERANCE[dtype], rtol=0)
    assert not ended_programs(prompts.query.device).any()


@pytest.mark.parametrize("programs", [2, 5, 30])
def test_fewer_programs_than_pieces(programs: int) -> None:
    """Programs compute several pieces each."""
    if not is_hopper(torch.device("cuda")):
        pytest.skip("needs a Hopper GPU")
    prompts = Prompts([9000, 200, 3000], [20, 9, 1], (8, 1, 128), 16, BF16, 8, 1)
    keys, values = prompts.planes
    rest = prompts.table, prompts.starts, prompts.lengths
    for _ in range(2):
        found = hopper_extend(prompts.query, keys, values, *rest, prompts.scale, programs=programs)
        torch.testing.assert_close(found.float(), prompts.expected(), atol=TOLERANCE[BF16], rtol=0)
    assert not ended_programs(prompts.query.device).any()


@pytest.mark.parametrize("room", [1, 70, 10_000])
@pytest.mark.parametrize(
    ("lengths", "new", "heads", "page_size", "dtype"),
    [
        ([1000, 333, 2000], [200, 333, 1], (32, 8, 128), 16, BF16),
        ([1000, 5003, 7], [300, 80, 7], (28, 4, 128), 16, FP16),
        ([0, 3000], [100, 2048], (32, 8, 128), 16, BF16),
        ([900, 64], [150, 64], (16, 16, 64), 32, BF16),
        ([900, 800], [150, 70], (8, 2, 80), 16, BF16),
    ],
)
def test_fp8_pages_that_are_converted_or_not(
    lengths: list[int],
    new: list[int],
    heads: tuple[int, int, int],
    page_size: int,
    dtype: torch.dtype,
    room: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Requests with few new tokens, or without room for their pages, read FP8 pages."""
    monkeypatch.setattr(conversion, "room_for_pages", lambda *_: room)
    prompts = Prompts(lengths, new, heads, page_size, dtype, 64, 9)
    (keys, values), expected = prompts.in_fp8(), prompts.expected_in_fp8()
    rest = prompts.table, prompts.starts, prompts.lengths, prompts.scale, *FP8_SCALES
    for _ in range(2):
        found = converted_attention(prompts.query, keys, values, *rest)
        torch.testing.assert_close(found.float(), expected, atol=2 * TOLERANCE[dtype], rtol=1e-2)
    assert not ended_programs(prompts.query.device).any()


def test_a_graph_converts_the_pages_of_other_requests_than_those_of_its_capture() -> None:
    """First only one of two requests is long, and then only the other one."""
    captured = Prompts([2000, 4000], [400, 64], (32, 8, 128), 16, BF16, 8)
    keys, values = captured.in_fp8()
    given = captured.query, keys, values, captured.table, captured.starts, captured.lengths
    run = partial(converted_attention, *given, captured.scale, *FP8_SCALES)
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for starts in ([0, 400, 464], [0, 30, 464]):
        captured.starts.copy_(torch.tensor(starts + [464] * 6, dtype=torch.int32))
        graph.replay()
        expected = captured.expected_in_fp8()
        torch.testing.assert_close(out.float(), expected, atol=2 * TOLERANCE[BF16], rtol=1e-2)


def test_a_graph_serves_other_lengths_than_those_of_its_capture() -> None:
    """Its grid follows from the number of rows, so a short prompt's graph also serves one with a long prefix."""
    captured = Prompts([64], [64], (32, 8, 128), 16, BF16, 8)
    ended_programs(captured.query.device)
    wide = torch.full((8, 700), BAD_PAGE, dtype=torch.int32, device="cuda")
    wide[:, : captured.table.shape[1]] = captured.table
    pool = [torch.randn(700, 16, 8, 128, device="cuda").to(BF16) for _ in range(2)]
    for kept, made in zip(pool, captured.planes, strict=True):
        kept[: len(made)] = made
    given = captured.query, *pool, wide, captured.starts, captured.lengths, None, captured.scale
    extend_attention(*given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = extend_attention(*given)
    graph.replay()
    torch.testing.assert_close(out.float(), captured.expected(), atol=TOLERANCE[BF16], rtol=0)
    for kept in pool:
        kept.nan_to_num_()
    wide[0] = torch.randperm(700, device="cuda")
    wide[1, :2] = wide[0, :2]
    captured.starts.copy_(torch.tensor([0, 40, 64, *[64] * 6], dtype=torch.int32))
    captured.lengths.copy_(torch.tensor([11_000, 30, *[0] * 6], dtype=torch.int32))
    graph.replay()
    query, keys, values = (tensor.float() for tensor in (captured.query, *pool))
    rest = wide, captured.starts, captured.lengths, None, captured.scale
    expected = extend_reference(query, keys, values, *rest)
    torch.testing.assert_close(out.float(), expected, atol=TOLERANCE[BF16], rtol=0)
