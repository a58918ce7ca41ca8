"""Compiled kernels of gated delta layers against their torch references on the same GPU, at published shapes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from common.engine.forward.model_runner import load_model
from common.engine.ops.delta_extend import delta_extend, delta_extend_reference
from common.engine.ops.delta_step import delta_step, delta_step_reference
from tests.unit.engine import families
from tests.unit.engine.graphs.rig import DeviceDriver

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(240),
]
SHAPES = [(32, 2, 128, 128), (6, 3, 64, 96)]  # value heads, those of a key head, key and value width
SLOTS = 8


class Layer:
    """Weights and planes with random values."""

    def __init__(self, heads: int, served: int, key: int, value: int, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        self.heads, self.value, self.dtype = heads, value, dtype
        self.channels = 2 * heads // served * key + heads * value
        self.conv = self.made(SLOTS, self.channels, 3, dtype=dtype)
        self.recurrent = self.made(SLOTS, heads, key, value)
        self.conv[0] = self.recurrent[0] = 0
        taps = (0.5 * self.made(self.channels, 4)).to(dtype)
        self.weights = taps, self.made(heads), self.made(heads), self.made(value), 1e-6

    @staticmethod
    def made(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, device="cuda").to(dtype)

    def tokens(self, count: int) -> Tensor:
        return self.made(count, self.channels + 2 * self.heads + self.heads * self.value, dtype=self.dtype)


def close(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """The output norm divides by small numbers, so single values may be further apart than the rest.

    States are float32, but operands of products have the `dtype` of the inputs.
    """
    limit = {torch.float32: 2e-3, torch.bfloat16: 4e-2 if expected.dtype == dtype else 1e-2}[dtype]
    assert torch.isfinite(actual).all()
    apart = (actual.float() - expected.float()).norm() / expected.float().norm()
    assert apart < limit, f"{apart:.2e}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("new", "most"), [(1, 1), (4, 4)])
def test_delta_step(dtype: torch.dtype, shape: tuple[int, int, int, int], new: int, most: int) -> None:
    layer = Layer(*shape, dtype)
    slots, rows, pending = torch.tensor([[4, 0, 2, 5], [2, 0, 3, 1], [most, 0, 0, 1]], device="cuda").unbind()
    window = layer.made(5, most, layer.channels + 2 * layer.heads, dtype=dtype)
    window[0] = 0
    projected = layer.tokens(4 * new)
    projected[new : 2 * new] = torch.nan
    live = torch.arange(4, device="cuda").repeat_interleave(new) != 1
    results = []
    for run in (delta_step_reference, delta_step):
        planes = layer.conv.clone(), layer.recurrent.clone(), window.clone()
        out = run(projected, *layer.weights, *planes, slots, rows, pending)
        results.append((out[live], *planes))
    for actual, expected in zip(results[1], results[0], strict=True):
        close(actual, expected, dtype)
    assert not any(plane[0].any() for plane in results[1][1:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES)
def test_delta_extend(dtype: torch.dtype, shape: tuple[int, int, int, int]) -> None:
    layer = Layer(*shape, dtype)
    counts, before = torch.tensor([[130, 1, 65, 0, 1000], [64, 0, 0, 0, 128]], device="cuda").unbind()
    slots = torch.tensor([1, 2, 3, 0, 5], device="cuda")
    starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int()
    saves = torch.zeros(5, 2, 2, dtype=torch.int64, device="cuda")  # states inside the prompts
    saves[0, 1] = torch.tensor([6, 128])
    saves[4] = torch.tensor([[4, 512], [7, 960]])
    projected = layer.tokens(int(counts.sum()) + 5)
    projected[-5:] = torch.nan
    results = []
    for run in (delta_extend_reference, delta_extend):
        planes = layer.conv.clone(), layer.recurrent.clone()
        out = run(projected, *layer.weights, *planes, slots, starts, (before + counts).int(), saves)
        results.append((out, *planes))
    for actual, expected in zip(results[1], results[0], strict=True):
        close(actual, expected, dtype)
    for actual, expected in zip(results[1][1:], results[0][1:], strict=True):
        for slot in (4, 6, 7):
            close(actual[slot], expected[slot], dtype)
    assert not results[1][0][-5:].any()
    assert not any(plane[0].any() for plane in results[1][1:])


def test_a_graph_records_both() -> None:
    """No host sync: lengths, slots and accepted tokens are read on the device when the graph is replayed."""
    layer = Layer(*SHAPES[1], torch.bfloat16)
    window = torch.zeros(3, 2, layer.channels + 2 * layer.heads, dtype=torch.bfloat16, device="cuda")
    projected, index = layer.tokens(4), torch.zeros(2, dtype=torch.int64, device="cuda")
    pending, starts = torch.zeros_like(index), torch.zeros(3, dtype=torch.int32, device="cuda")
    lengths = torch.zeros(2, dtype=torch.int32, device="cuda")

    def run() -> tuple[Tensor, Tensor]:
        kept = layer.conv, layer.recurrent
        prompt = delta_extend(projected, *layer.weights, *kept, index, starts, lengths)
        new = projected.clone()  # not chained: the step may read the planes only after it
        return prompt, delta_step(new, *layer.weights, *kept, window, index, index, pending)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = run()
    index.copy_(torch.tensor([2, 1]))
    starts.copy_(torch.tensor([0, 3, 4]))
    lengths.copy_(torch.tensor([3, 1]))
    graph.replay()
    found = [each.clone() for each in outputs]
    layer_again = Layer(*SHAPES[1], torch.bfloat16)
    kept = layer_again.conv, layer_again.recurrent
    expected = delta_extend_reference(projected, *layer.weights, *kept, index, starts, lengths)
    close(found[0], expected, layer.dtype)
    window.zero_()
    stepped = delta_step_reference(projected, *layer.weights, *kept, window, index, index, pending)
    close(found[1], stepped, layer.dtype)


@pytest.mark.parametrize("name", ["qwen3.5", "qwen3-next", "qwen3.5-moe-tied"])
def test_logits_of_whole_models_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    """Prompts in chunks and decode steps, over pages and states on the GPU."""
    lengths = (1, 63, 64, 65, 200)
    ids = [
        torch.randint(families.VOCAB, (n + 3,), generator=torch.Generator().manual_seed(n)) for n in lengths
    ]
    model = families.build(name)
    path = families.save(model, tmp_path)
    ours = load_model(path, device="cuda")[0]
    found = DeviceDriver(ours, ids, 16).run_all(64, lengths)
    for actual, each in zip(found, ids, strict=True):
        expected = families.reference_logits(model, each)
        torch.testing.assert_close(actual.cpu().float(), expected, atol=2e-3, rtol=0)
