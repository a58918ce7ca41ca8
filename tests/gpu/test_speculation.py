"""Draft, verify and draft-extend as CUDA graphs: the rounds of the tape tests, and what only a GPU can show.

Rows E1-E4, A10. Draft probabilities and hidden states of different matrix shapes differ in rounding, so they are
compared within a tolerance; tokens and drafts exactly (float32, random weights: no ties).
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from common.engine.graphs.admission import Fallback
from common.engine.graphs.backends.cuda import CudaRecorder
from common.engine.graphs.backends.full import FullGraphs
from common.engine.graphs.backends.none import NoGraphs
from common.engine.host_copies import on_device
from common.node.stopwatch import stopwatch_for
from decode_node.graphs.decode_graph import GREEDY
from tests.fakes.waiting_for_device import waits_are_errors
from tests.unit.speculative.rig import RoundRig, prompts_of
from tests.unit.speculative.test_round_graphs import (
    ALL_GREEDY,
    KINDS,
    MIXED,
    PARAMS,
    PROMPTS,
    ROUNDS,
    expect_same,
    run,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
GPU = torch.device("cuda")


@pytest.fixture(autouse=True)
def _full_precision() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def full() -> FullGraphs:
    return FullGraphs(CudaRecorder(GPU))


def rig(name: str, buckets: tuple[int, ...], params: list[str] = MIXED, page_size: int = 16) -> RoundRig:
    backend = full if buckets else NoGraphs
    return RoundRig(
        KINDS[name],
        PROMPTS,
        [PARAMS[each] for each in params],
        backend,
        buckets,
        page_size=page_size,
        device=GPU,
    )


@pytest.mark.parametrize("buckets", [(1, 2, 4), (5,)])
@pytest.mark.parametrize("name", KINDS)
def test_replay_equals_eager(name: str, buckets: tuple[int, ...]) -> None:
    """Rows E1, E2, E4: below, at and above the captured maximum, shrinking and growing, every sampling variant."""
    graphs = rig(name, buckets)
    run(graphs, rig(name, ()), ROUNDS)
    above = sum(len(chosen) > max(buckets) for chosen in ROUNDS)
    for phase in graphs.phases:
        assert phase.graphs.counters.replays.total() == len(ROUNDS) - above
        assert phase.graphs.counters.fallbacks == ({Fallback.TOO_LARGE: above} if above else {})


@pytest.mark.parametrize("name", ["ngram", "standalone", "eagle3", "eagle3-tree", "mtp"])
def test_the_gpu_gives_the_tokens_of_the_cpu(name: str) -> None:
    """Tokens and accept lengths equal those of the references on the CPU, round by round."""
    graphs = rig(name, (5,), ALL_GREEDY)
    eager = RoundRig(
        KINDS[name], PROMPTS, [PARAMS[GREEDY]] * 5, NoGraphs, (), page_size=16, device=torch.device("cpu")
    )
    for chosen in ROUNDS:
        one, other = graphs.round(chosen), eager.round(chosen)
        assert one.tokens == other.tokens
        assert torch.equal(one.trees.cpu(), other.trees)


@pytest.mark.parametrize("name", ["eagle3", "eagle-tree", "ngram", "standalone", "mtp"])
def test_from_32_requests_to_12_with_graphs_for_8(name: str) -> None:
    """Rows E1, E4: SGLang's EAGLE-3 draft graph read out of bounds here."""
    prompts, params = prompts_of([3 + n % 5 for n in range(32)]), [PARAMS[GREEDY]] * 32
    made = [
        RoundRig(KINDS[name], prompts, params, backend, buckets, page_size=16, device=GPU)
        for backend, buckets in ((full, (1, 2, 4, 8)), (NoGraphs, ()))
    ]
    run(made[0], made[1], [list(range(32))[-size:] for size in (32, 12, 7, 8, 9, 16, 1, 32)])


@pytest.mark.parametrize(
    ("params", "chosen"), [(ALL_GREEDY, [0, 1]), (MIXED, [2, 3])], ids=["greedy", "adjusted"]
)
@pytest.mark.parametrize("name", KINDS)
def test_a_round_never_waits_for_the_device(name: str, params: list[str], chosen: list[int]) -> None:
    """Synchronisation raises an error during a whole launch, including the host's copies and those of the results.

    This includes penalties, biases and logprobs, whose sampling follows the graph.
    """
    graphs = rig(name, (2,), params)
    graphs.round(chosen)
    call = graphs.call(chosen)
    placed = call.placed.tolist()
    torch.cuda.synchronize()
    with waits_are_errors():
        on_device(placed, GPU)
        graphs.drafter.propose(call)
        emitted = graphs.verify(call).on_host()
        graphs.drafter.draft_extend(call)
    torch.cuda.synchronize()
    assert emitted.packed.is_pinned()
    assert all(phase.graphs.counters.replays.total() == 2 for phase in graphs.phases)


def test_results_are_read_while_the_next_round_runs() -> None:
    """Pinned copies precede the next replay on the stream: its results do not leak into them."""
    graphs, other = rig("eagle3", (2,), ALL_GREEDY), rig("eagle3", (2,), ALL_GREEDY)
    call = graphs.call([0, 1])
    graphs.drafter.propose(call)
    emitted = graphs.verify(call).on_host()
    graphs.drafter.draft_extend(call)
    for _ in range(3):
        graphs.round([0, 1])
    torch.cuda.synchronize()
    call = other.call([0, 1])
    other.drafter.propose(call)
    expected = other.verify(call).packed.cpu()
    assert torch.equal(emitted.packed, expected)


def test_the_time_of_each_phase_is_measured_without_waiting() -> None:
    graphs = rig("eagle3", (2,), ALL_GREEDY)
    graphs.round([0, 1])
    call = graphs.call([0, 1])
    torch.cuda.synchronize()
    with waits_are_errors():
        watch = stopwatch_for(GPU)()
        for phase in (graphs.drafter.propose, graphs.verify, graphs.drafter.draft_extend):
            phase(call)
            watch.lap()
    torch.cuda.synchronize()
    assert len(watch.seconds()) == 3
    assert all(0 < seconds < 1 for seconds in watch.seconds())


@pytest.mark.parametrize("name", ["eagle3-tree", "mtp"])
def test_idle_rounds(name: str) -> None:
    """Row D6: rounds without rows, replayed and eager."""
    for buckets in ((), (2,)):
        idle, other = rig(name, buckets, ALL_GREEDY), rig(name, buckets, ALL_GREEDY)
        for chosen in ([0, 1], [], [1, 2][: 2 if not buckets else 1]):
            seen = idle.round(chosen)
            if chosen:
                expect_same(seen, other.round(chosen))
