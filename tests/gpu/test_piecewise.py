"""Piecewise prompt graphs as CUDA graphs, by both compilers, in the same steps as breakable ones."""

from __future__ import annotations

import pytest
import torch

from common.engine.graphs.backends.cuda import CudaRecorder
from common.engine.graphs.spec import ShapeKey
from prefill_node.graphs.backends.breakable import BreakableGraphs
from prefill_node.graphs.backends.compiled_body import CompiledBodies
from prefill_node.graphs.backends.piecewise import PiecewiseGraphs
from prefill_node.graphs.static_extend import BROKEN
from tests.fakes.waiting_for_device import waits_are_errors
from tests.gpu.prompt_steps import IDS, check_prompt_replays
from tests.unit.engine.graphs.rig import AUX, extend_driver, sequences

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("default"),  # inductor's own
]
GPU = torch.device("cuda")
MIB = 2**20
BUCKETS = (2, 4, 8, 16, 32, 48)
COMPILERS = ("eager", "inductor")
BODIES = {compiler: CompiledBodies(compiler) for compiler in COMPILERS}


def piecewise(compiler: str) -> PiecewiseGraphs:
    return PiecewiseGraphs(CudaRecorder(GPU), BODIES[compiler])


@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("poisoned", [False, True])
@pytest.mark.parametrize("aux", [(), AUX])
@pytest.mark.parametrize("unbroken", [BROKEN, ShapeKey(16, 2), ShapeKey(48, 9)])
def test_prefill_replay_equals_eager(
    compiler: str, poisoned: bool, aux: tuple[int, ...], unbroken: ShapeKey
) -> None:
    """Rows A1, A6, C3: below, at and above the captured maximum, shrinking and growing, free of poison."""
    check_prompt_replays(piecewise(compiler), BUCKETS, poisoned, aux, unbroken)


@pytest.mark.parametrize("compiler", COMPILERS)
def test_a_replay_never_waits_for_the_device(compiler: str) -> None:
    driver, extend = extend_driver(IDS, piecewise(compiler), BUCKETS, page_size=16, device=GPU)
    batch = driver.batch([0], [9])
    torch.cuda.synchronize()
    with waits_are_errors():
        extend(batch)
    assert extend.graphs.counters.replays.total() == 1


@pytest.mark.parametrize("compiler", COMPILERS)
def test_pieces_take_the_memory_of_segments_between_breaks(compiler: str) -> None:
    """A segment's tensors are weak references, those that cross a break strong: no more than breakable graphs."""
    sizes, long = (64, 256, 1024, 4096), sequences([40])
    _, broken = extend_driver(long, BreakableGraphs(CudaRecorder(GPU)), sizes, page_size=16, device=GPU)
    _, pieces = extend_driver(long, piecewise(compiler), sizes, page_size=16, device=GPU)
    assert pieces.graphs.rows[0].nbytes <= 1.5 * broken.graphs.rows[0].nbytes + 8 * MIB
    assert sum(row.nbytes for row in pieces.graphs.rows[1:]) <= max(pieces.graphs.rows[0].nbytes, 8 * MIB)
