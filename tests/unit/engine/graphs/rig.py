"""Small models whose prompts run through prefill graphs and whose rows run through decode graphs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from common.engine.forward.batch import CaptureHiddenMode, ForwardBatch, ForwardMode
from common.engine.graphs.backends.base import Backend
from common.engine.graphs.backends.full import FullGraphs
from common.engine.graphs.backends.none import NoGraphs
from common.engine.graphs.backends.tape import TapeRecorder
from common.engine.graphs.spec import ShapeKey
from common.engine.layers.placement import Placement
from common.engine.models.causal_lm import CausalLM
from common.engine.models.model_registry import build_model
from common.engine.sampling.sampler import SampleOutput
from common.engine.sampling.sampling_plan import sampling_variant
from common.engine.state.relay_state import RelayState
from common.messages.generation import SamplingParams
from decode_node.graphs.decode_graph import VARIANTS, DecodeGraphs, decode_spec
from decode_node.page_table import PageTable
from prefill_node.graphs.backends.breakable import BreakableGraphs
from prefill_node.graphs.backends.compiled_body import CompiledBodies
from prefill_node.graphs.backends.piecewise import PiecewiseGraphs
from prefill_node.graphs.prefill_extend import PrefillExtend, extend_spec
from prefill_node.graphs.static_extend import BROKEN
from tests.fakes.tiny_model import CONFIG, VOCAB, drawn
from tests.unit.engine.paged_driver import Driver

CPU = torch.device("cpu")
BACKENDS: dict[str, Callable[[], Backend]] = {
    "none": NoGraphs,
    "tape": lambda: FullGraphs(TapeRecorder()),
    "breakable": lambda: BreakableGraphs(TapeRecorder()),
}
AUX = (0, 1, 2)
BODIES = CompiledBodies()  # for `model`, shared by all tests of a process


@functools.cache
def model(aux: tuple[int, ...] = (), seed: int = 0, device: torch.device = CPU) -> CausalLM:
    """Build a model of two layers, one with a sliding window, with query and key norms; all weights are random."""
    config = replace(CONFIG, sliding_windows=(None, 11), qk_norm=True, head_dim=16)
    built = build_model(config, Placement(torch.float32, CPU), aux).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in drawn(built):
            parameter.normal_(std=0.3, generator=generator)
            if "norm" in name:
                parameter.add_(1.0)
    if device.type != "cpu":
        built = built.to(device)
        built.placement = Placement(torch.float32, device)
    return built


def piecewise(bodies: CompiledBodies = BODIES) -> Backend:
    return PiecewiseGraphs(TapeRecorder(), bodies)


def sequences(lengths: Sequence[int], seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCAB, (n,), generator=generator) for n in lengths]


class DeviceDriver(Driver):
    """A Driver whose batches are on the model's device."""

    def __init__(self, model: CausalLM, sequences: Sequence[Tensor], page_size: int) -> None:
        super().__init__(model, [ids.to(model.placement.device) for ids in sequences], page_size)

    def batch(
        self,
        rows: Sequence[int],
        lengths: Sequence[int],
        mode: ForwardMode = ForwardMode.EXTEND,
        hidden_mode: CaptureHiddenMode = CaptureHiddenMode.NULL,
    ) -> ForwardBatch:
        with self.pool.device:
            return super().batch(rows, lengths, mode, hidden_mode)


def extend_driver(
    ids: Sequence[Tensor],
    backend: Backend,
    buckets: Sequence[int],
    page_size: int = 4,
    hidden: CaptureHiddenMode = CaptureHiddenMode.FULL,
    poisoned: bool = False,
    aux: tuple[int, ...] = (),
    device: torch.device = CPU,
    unbroken: ShapeKey = BROKEN,
) -> tuple[DeviceDriver, PrefillExtend]:
    """Make a driver whose prompts run through captured prefill graphs of `buckets`."""
    driver = DeviceDriver(model(aux, device=device), ids, page_size)
    runner = driver.runner
    spec = extend_spec(buckets, hidden, unbroken=unbroken)
    extend = PrefillExtend(runner, spec, backend, poisoned, unbroken)
    extend.graphs.capture()
    assert not [row.error for row in extend.graphs.rows if row.error]
    driver.runner = extend  # type: ignore[assignment]  # has the same call signature
    return driver, extend


class DecodeRig:
    """Prompts in the cache, one relay row each, and a decode step over them."""

    def __init__(
        self,
        prompts: Sequence[Tensor],
        params: Sequence[SamplingParams],
        backend: Backend,
        buckets: Sequence[int],
        variants: Sequence[str] = VARIANTS,
        page_size: int = 4,
        room: int = 40,
        device: torch.device = CPU,
        target: CausalLM | None = None,
    ) -> None:
        long = [torch.cat((ids, ids.new_zeros(room))) for ids in prompts]
        driver = DeviceDriver(target or model(device=device), long, page_size)
        logits = driver.run(list(range(len(prompts))), [len(ids) for ids in prompts]).logits
        width = max(len(pages) for pages in driver.pages)
        self.params = list(params)
        self.pool = driver.pool
        self.relay = RelayState.allocate(len(prompts) + 2, VOCAB, device)
        self.table = PageTable(len(prompts) + 2, width, device)
        ends = torch.tensor([len(ids) for ids in prompts], device=device).cumsum(0) - 1
        self.first = logits[ends].argmax(-1).tolist()
        for index, (ids, sampling) in enumerate(zip(prompts, params, strict=True)):
            row = index + 1
            self.table.write([(row, logical, page) for logical, page in enumerate(driver.pages[index])])
            self.relay.write_row(row, [*ids.tolist(), self.first[index]], 1, sampling)
        self.graphs = DecodeGraphs(
            driver.runner, self.relay, self.table, decode_spec(buckets, variants), backend, width * page_size
        )
        self.graphs.graphs.capture()
        assert not [row.error for row in self.graphs.graphs.rows if row.error]

    def step(self, requests: Iterable[int]) -> SampleOutput:
        """Run one step of requests, numbered from 0; row = number + 1."""
        chosen = list(requests)
        rows = torch.tensor([request + 1 for request in chosen], device=self.relay.seq_len.device)
        return self.graphs(rows, sampling_variant(self.params[request] for request in chosen))
