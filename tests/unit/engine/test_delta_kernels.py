"""The kernels of gated delta layers against their torch references, in Triton's interpreter on the CPU."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from common.engine.ops import delta_chunks
from common.engine.ops.delta_chunks import delta_extend_triton
from common.engine.ops.delta_extend import delta_extend_reference
from common.engine.ops.delta_step import delta_step_reference
from common.engine.ops.delta_tiles import choose_chunks
from common.engine.ops.delta_tokens import StepTiles, choose_step, delta_step_triton
from common.engine.ops.shared_memory import H200, SharedMemory
from common.engine.ops.triton_kernel import tl

pytestmark = [
    pytest.mark.skipif(tl is None, reason="Triton is not installed"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="compiled kernels are tested in tests/gpu"),
]
DTYPES = [torch.float32, torch.float16]
EPS = 1e-3
SLOTS = 7


def close(actual: Tensor, expected: Tensor, dtype: torch.dtype | None = None) -> None:
    """`dtype`: of the operands of products, if it is not that of the tensors."""
    limit = 4e-3 if (dtype or expected.dtype) == torch.float16 else 2e-5
    torch.testing.assert_close(actual, expected, atol=limit, rtol=limit, equal_nan=True)


@dataclass
class Layer:
    """Weights and planes of one layer with random values; nothing that a request does not own may be read."""

    heads: int
    served: int
    key: int
    value: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        torch.manual_seed(self.heads + self.key)
        self.channels = 2 * self.heads // self.served * self.key + self.heads * self.value
        self.taps = (0.5 * torch.randn(self.channels, 4)).to(self.dtype)
        self.a_log, self.dt_bias = torch.randn(2, self.heads).unbind()
        self.norm = torch.randn(self.value)
        self.conv = torch.randn(SLOTS, self.channels, 3).to(self.dtype)
        self.recurrent = torch.randn(SLOTS, self.heads, self.key, self.value)
        self.conv[0] = self.recurrent[0] = 0

    @property
    def weights(self) -> tuple[Tensor, Tensor, Tensor, Tensor, float]:
        return self.taps, self.a_log.contiguous(), self.dt_bias.contiguous(), self.norm, EPS

    def tokens(self, count: int) -> Tensor:
        """Return rows of the input projection, with a stride."""
        width = self.channels + 2 * self.heads + self.heads * self.value
        return torch.randn(count, width + 3).to(self.dtype)[:, :width]


LAYERS = [(6, 3, 8, 12), (2, 2, 16, 8), (4, 1, 5, 4)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", LAYERS)
@pytest.mark.parametrize(("new", "most"), [(1, 1), (3, 4)])
def test_delta_step(dtype: torch.dtype, shape: tuple[int, int, int, int], new: int, most: int) -> None:
    layer = Layer(*shape, dtype)
    slots, rows = torch.tensor([4, 0, 2, 5]), torch.tensor([2, 0, 3, 1])
    pending = torch.tensor([most, 0, 0, 1])
    window = torch.randn(5, most, layer.channels + 2 * layer.heads).to(dtype)
    window[0] = 0
    for row, count in zip(rows.tolist(), pending.tolist()):
        window[row, count:] = torch.nan if row else 0
    projected = layer.tokens(4 * new)
    projected[new : 2 * new] = torch.nan
    results = []
    for run in (delta_step_reference, delta_step_triton):
        planes = layer.conv.clone(), layer.recurrent.clone(), window.clone()
        out = run(projected, *layer.weights, *planes, slots, rows, pending)
        results.append((out, *planes))
    live = torch.arange(4).repeat_interleave(new) != 1
    (expected, *expected_planes), (actual, *actual_planes) = results
    close(actual[live], expected[live])
    assert not actual[~live].any(), "padding returns zeros"
    for ours, theirs in zip(actual_planes, expected_planes, strict=True):
        close(ours, theirs)
        assert not ours[0].any()
    assert torch.equal(actual_planes[1][[1, 3]], layer.recurrent[[1, 3]]), "other slots stay"


def test_a_launcher_checks_its_arguments() -> None:
    layer = Layer(2, 1, 4, 4, torch.float32)
    one = torch.ones(1, dtype=torch.int64)
    window = torch.zeros(2, 1, layer.channels + 2 * layer.heads)
    for tokens, kept, states, said in (
        (2, window, layer.recurrent, "2 new tokens, the window has 1"),
        (1, window[..., 1:].contiguous(), layer.recurrent, "inputs, two values per head, and gates"),
        (1, window.half(), layer.recurrent, "kept inputs"),
        (1, window, layer.recurrent.half(), "states are float32"),
    ):
        with pytest.raises(AssertionError, match=said):
            delta_step_triton(layer.tokens(tokens), *layer.weights, layer.conv, states, kept, one, one, one)


def test_states_inside_a_prompt_are_saved() -> None:
    """A saved state is that of a prompt which ends there; a prompt that goes on from it returns the same rows."""
    layer = Layer(3, 3, 8, 12, torch.float32)
    counts, slots = torch.tensor([200, 64, 130]), torch.tensor([1, 2, 3])
    starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int()
    lengths = (counts + torch.tensor([64, 0, 0])).int()
    saves = torch.tensor([[[4, 128], [5, 192]], [[0, 0], [0, 0]], [[0, 64], [6, 128]]])
    projected = layer.tokens(int(counts.sum()))
    for run in (delta_extend_reference, delta_extend_triton):
        planes = layer.conv.clone(), layer.recurrent.clone()
        out = run(projected, *layer.weights, *planes, slots, starts, lengths, saves)
        plain = layer.conv.clone(), layer.recurrent.clone()
        close(out, run(projected, *layer.weights, *plain, slots, starts, lengths))
        for request, slot, tokens in ((0, 4, 128), (0, 5, 192), (2, 6, 128)):
            mine = projected[int(starts[request]) :]
            at, begin = slots[request : request + 1], int(starts[request])
            ends, before = torch.tensor([0, tokens]).int(), lengths[request : request + 1] - counts[request]
            short = layer.conv.clone(), layer.recurrent.clone()
            run(mine[:tokens], *layer.weights, *short, at, ends, (before + tokens).int())
            for saved, single in zip(planes, short, strict=True):
                close(saved[slot], single[at[0]])
            rest = int(counts[request]) - tokens
            ends, into = torch.tensor([0, rest]).int(), torch.tensor([slot])
            after = run(
                mine[tokens : tokens + rest],
                *(*layer.weights, *planes, into, ends, lengths[request : request + 1]),
            )
            close(after, out[begin + tokens : begin + tokens + rest])
        assert not planes[0][0].any()
        assert not planes[1][0].any()


def test_a_program_of_a_step_keeps_its_part_of_a_state_in_registers() -> None:
    """A thread has a hundred registers or more beside those of the state, which it reads and writes once."""
    for heads in (32, 2048):
        for key, value in ((128, 128), (256, 256), (64, 128), (16, 16), (8192, 16)):
            tiles = choose_step(heads, key, value, 132)
            assert value % tiles.part == 0
            if tiles.part > 1:
                assert key * tiles.part / (32 * tiles.warps) <= tiles.registers - 100
    assert choose_step(64 * 32, 128, 128, 132) == StepTiles(64, 2, 255)


# (new tokens, tokens before them, slot) of each request
BATCHES = [
    [(1, 0, 3)],
    [(2, 0, 1), (3, 64, 2), (1, 128, 4)],
    [(64, 0, 5), (65, 0, 2), (0, 0, 0)],
    [(130, 64, 1), (63, 0, 3), (5, 64, 4), (0, 0, 0)],
]


@pytest.mark.parametrize(
    ("dtype", "shape", "batch"),
    [
        *((torch.float32, (3, 3, 8, 12), batch) for batch in BATCHES),
        (torch.float16, (2, 1, 16, 40), BATCHES[1]),
    ],
)
def test_delta_extend(
    dtype: torch.dtype, shape: tuple[int, int, int, int], batch: list[tuple[int, int, int]]
) -> None:
    layer = Layer(*shape, dtype)
    counts, before, slots = (torch.tensor(each) for each in zip(*batch, strict=True))
    starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int()
    for at, done in zip(slots.tolist(), before.tolist()):
        if at and not done:
            layer.conv[at] = layer.recurrent[at] = torch.nan
    projected = layer.tokens(int(counts.sum()) + 3)
    projected[-3:] = torch.nan
    results = []
    for run in (delta_extend_reference, delta_extend_triton):
        planes = layer.conv.clone(), layer.recurrent.clone()
        out = run(projected, *layer.weights, *planes, slots, starts, (before + counts).int())
        results.append((out, *planes))
    for ours, theirs in zip(results[1], results[0], strict=True):
        close(ours, theirs, dtype)
    assert not results[1][0][-3:].any(), "padding returns zeros"
    assert not results[1][1][0].any()
    assert not results[1][2][0].any()


@pytest.mark.parametrize("shared", [99 << 10, 163 << 10, H200.shared_bytes])
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize(("keys", "values"), [(16, 16), (64, 128), (128, 128), (256, 64), (256, 256)])
def test_tiles_of_prompts_fit_the_gpu(keys: int, values: int, itemsize: int, shared: int) -> None:
    tiles = choose_chunks(keys, values, itemsize, shared)
    assert tiles.fit(itemsize, shared)
    assert min(tiles.chunk, tiles.part, tiles.step) >= 16
    if shared == H200.shared_bytes and itemsize == 2 and max(keys, values) <= 128:
        assert tiles == choose_chunks(keys, values, itemsize, 1 << 30), "nothing is reduced"


def test_heads_that_no_tile_fits_are_refused() -> None:
    with pytest.raises(RuntimeError, match="4096 keys and 16 values of 4 bytes do not fit the 101376 bytes"):
        choose_chunks(4096, 16, 4, 99 << 10)


def test_shorter_chunks_give_the_same_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU with little shared memory computes fewer tokens together."""
    layer = Layer(3, 3, 8, 12, torch.float32)
    starts, slots = torch.tensor([0, 70, 73], dtype=torch.int32), torch.tensor([2, 4])
    projected, lengths = layer.tokens(75), torch.tensor([70, 67], dtype=torch.int32)
    planes = layer.conv.clone(), layer.recurrent.clone()
    expected = delta_extend_reference(projected, *layer.weights, *planes, slots, starts, lengths)
    monkeypatch.setattr(delta_chunks, "room_of", lambda device: SharedMemory(16 << 10, False))
    assert choose_chunks(16, 16, 4, 16 << 10).chunk < 64
    found = layer.conv.clone(), layer.recurrent.clone()
    close(delta_extend_triton(projected, *layer.weights, *found, slots, starts, lengths), expected)
    for ours, theirs in zip(found, planes, strict=True):
        close(ours, theirs)
