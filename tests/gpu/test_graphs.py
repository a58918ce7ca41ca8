"""The CUDA backends on a GPU: the models and steps of the tape tests, and what only a GPU can show.

Results of different matrix shapes differ in rounding, so logits are compared within a tolerance and tokens exactly
(float32, random weights: no ties).
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
import torch
from torch import Tensor

from common.engine.graphs.backends.cuda import Address, CudaRecorder
from common.engine.graphs.backends.full import FullGraphs
from common.engine.graphs.backends.none import NoGraphs
from common.engine.graphs.spec import ShapeKey
from common.engine.sampling.sampling_plan import sampling_variant
from common.messages.generation import SamplingParams
from decode_node.graphs.decode_graph import VARIANTS
from prefill_node.graphs.backends.break_point import break_point
from prefill_node.graphs.backends.breakable import BreakableGraphs
from prefill_node.graphs.static_extend import BROKEN
from tests.fakes.waiting_for_device import waits_are_errors
from tests.gpu.prompt_steps import CLOSE, IDS, check_prompt_replays
from tests.unit.engine.graphs.rig import AUX, DecodeRig, extend_driver, sequences

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
GPU = torch.device("cuda")
MIB = 2**20


def full() -> FullGraphs:
    return FullGraphs(CudaRecorder(GPU))


def breakable() -> BreakableGraphs:
    return BreakableGraphs(CudaRecorder(GPU))


class Layer:
    """A break that reads a host value of the live batch."""

    def __init__(self) -> None:
        self.live = 4
        self.x = torch.randn(4, 1024, device=GPU)

    @break_point
    def attend(self, x: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        out[: self.live] = x[: self.live].cumsum(0)
        return out

    @break_point
    def attend_into(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        out = torch.zeros_like(x) if out is None else out
        out[: self.live] = x[: self.live] * self.live
        return out

    def run(self) -> Tensor:
        y = self.x * 2
        for _ in range(3):
            y = y + self.attend(y.tanh()) * 0.5
            y = y + self.attend_into(y.sin())
        return y + self.x


def test_segments_and_breaks_replay_with_live_host_facts() -> None:
    layer = Layer()
    recording = breakable().capture(layer.run)
    assert (recording.breaks, len(recording.steps)) == (6, 13)
    with torch.inference_mode():
        for live in (4, 2, 3):
            layer.x.normal_()
            layer.live = live
            recording.replay()
            assert torch.equal(recording.output[:live], layer.run()[:live])


def test_full_ignores_breaks_and_no_break_is_one_graph() -> None:
    layer = Layer()
    assert len(full().capture(layer.run).steps) == 1
    assert len(breakable().capture(lambda: layer.x * 2).steps) == 1


def test_memory_of_segments_is_reused_by_later_segments() -> None:
    """Arguments are weak references and bridges are in the pool: forty breaks of 16 MiB cost less than their sum."""
    x = torch.randn(16 * MIB // 4, device=GPU)

    @break_point
    def pause(y: Tensor) -> Tensor:
        return y + 1

    def run() -> Tensor:
        y = x
        for _ in range(40):
            y = pause(y * 2) * 0.5
        return y

    backend = breakable()
    recording = backend.capture(run)
    assert recording.nbytes < 12 * 16 * MIB
    with torch.inference_mode():
        x.normal_()
        recording.replay()
        assert torch.equal(recording.output, run())
    smaller = backend.capture(lambda: pause(x[: MIB // 2] * 2) * 0.5)
    assert smaller.nbytes <= 2 * MIB  # fits into memory that the larger one left in the pool


@pytest.mark.parametrize("make", [full, breakable])
def test_a_host_sync_fails_one_capture_and_the_backend_stays_usable(make: Callable[[], FullGraphs]) -> None:
    layer, backend = Layer(), make()
    with pytest.raises(RuntimeError):
        backend.capture(lambda: layer.x * layer.x.sum().item())
    recording = backend.capture(lambda: layer.x * 3)
    with torch.inference_mode():
        layer.x.normal_()
        recording.replay()
        assert torch.equal(recording.output, layer.x * 3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64, torch.bool])
def test_an_address_is_the_tensor_without_its_ownership(dtype: torch.dtype) -> None:
    base = torch.arange(24, device=GPU).view(4, 6).to(dtype)
    for tensor in (base, base[1:, ::2], base.t(), base[:0], base[2, 3]):
        alias = Address.of(tensor).open()
        assert (alias.dtype, alias.shape, alias.stride()) == (tensor.dtype, tensor.shape, tensor.stride())
        assert torch.equal(alias, tensor)
    Address.of(base).open()[0, 0] = 1
    assert base[0, 0] == 1


BUCKETS = (4, 8, 16, 32, 48)


@pytest.mark.parametrize("poisoned", [False, True])
@pytest.mark.parametrize("aux", [(), AUX])
@pytest.mark.parametrize("unbroken", [BROKEN, ShapeKey(16, 2), ShapeKey(48, 9)])
def test_prefill_replay_equals_eager(poisoned: bool, aux: tuple[int, ...], unbroken: ShapeKey) -> None:
    """Rows A1, A6, C3: below, at and above the captured maximum, shrinking and growing, free of poison."""
    check_prompt_replays(breakable(), BUCKETS, poisoned, aux, unbroken)


PARAMS = [
    SamplingParams(max_tokens=99, temperature=0.0),
    SamplingParams(max_tokens=99, temperature=0.8, seed=2),
    SamplingParams(max_tokens=99, temperature=1.1, top_p=0.8, top_k=12, seed=3),
    SamplingParams(max_tokens=99, temperature=0.0, logprobs=2),
    SamplingParams(max_tokens=99, temperature=0.0),
]
BATCHES = [[0], [0, 4], [0, 1, 2, 3, 4], [4, 0], [3], [2, 1, 0], [0, 4, 1, 2], [1], [4, 3, 2, 1, 0], [0, 4]]


@pytest.mark.parametrize("buckets", [(1, 2, 4), (5,)])
@pytest.mark.parametrize("variants", [VARIANTS, ("filtered", "logits")])
def test_decode_replay_equals_eager(buckets: tuple[int, ...], variants: tuple[str, ...]) -> None:
    """Rows E4, A10: tokens, lengths and the padding row are equal for any captured sizes."""
    prompts = sequences([21, 9, 30, 4, 13])
    eager = DecodeRig(prompts, PARAMS, NoGraphs(), (), page_size=16, device=GPU)
    graphs = DecodeRig(prompts, PARAMS, full(), buckets, variants, page_size=16, device=GPU)
    for chosen in BATCHES:
        expected, actual = eager.step(chosen), graphs.step(chosen)
        assert torch.equal(actual.token_ids, expected.token_ids)
        assert not actual.invalid.any()
        if expected.logprobs is not None:
            torch.testing.assert_close(actual.logprobs, expected.logprobs, **CLOSE)
    assert torch.equal(graphs.relay.seq_len, eager.relay.seq_len)
    assert graphs.relay.seq_len[0] == 0


ADJUSTED = SamplingParams(
    max_tokens=99,
    temperature=0.9,
    min_p=0.02,
    repetition_penalty=1.2,
    presence_penalty=0.3,
    frequency_penalty=0.4,
    logit_bias=((3, 2.0), (9, -100.0)),
    min_tokens=6,
    stop_token_ids=(1, 2, 14),
    seed=9,
)


def test_adjusted_logits_after_a_replay_equal_eager() -> None:
    prompts = sequences([21, 9, 30])
    params = [ADJUSTED, PARAMS[0], msgspec.structs.replace(ADJUSTED, temperature=0.0)]
    eager = DecodeRig(prompts, params, NoGraphs(), (), page_size=16, device=GPU)
    graphs = DecodeRig(prompts, params, full(), (1, 2, 4), page_size=16, device=GPU)
    for chosen in ([0, 1, 2], [1], [2, 0], [0], [0, 1, 2], [2], [0, 1], [2, 1, 0], [0, 2]):
        assert eager.step(chosen).token_ids.tolist() == graphs.step(chosen).token_ids.tolist()
    assert torch.equal(eager.relay.adjustments.penalties.seen, graphs.relay.adjustments.penalties.seen)


@pytest.mark.parametrize("params", [PARAMS[:2], [ADJUSTED, PARAMS[0]]], ids=["plain", "adjusted"])
def test_a_step_never_waits_for_the_device(params: list[SamplingParams]) -> None:
    """Both kinds of step replay although synchronisation raises an error."""
    prompts = sequences([21, 9])
    decode = DecodeRig(prompts, params, full(), (2,), page_size=16, device=GPU)
    driver, extend = extend_driver(IDS, breakable(), BUCKETS, page_size=16, device=GPU)
    decode.step([0, 1])
    batch = driver.batch([0], [9])
    rows = torch.tensor([1, 2], device=GPU)
    facts = sampling_variant(decode.params)
    torch.cuda.synchronize()
    with waits_are_errors():
        decode.graphs(rows, facts)
        extend(batch)
    assert extend.graphs.counters.replays.total() == 1


def test_graphs_of_a_runner_share_one_pool() -> None:
    """The largest bucket is captured first: smaller ones fit into the memory that it reserved."""
    _, extend = extend_driver(sequences([40]), breakable(), (64, 256, 1024, 4096), page_size=16, device=GPU)
    first, *others = [row.nbytes for row in extend.graphs.rows]
    assert sum(others) <= max(first, 4 * 2 * MIB)
