"""The trial that measures the memory of graphs before the KV pool of a GPU node is sized."""

from __future__ import annotations

import pytest
import torch

from common.engine.forward.batch import CaptureHiddenMode
from common.engine.graphs.node_graphs import GRAPH_BYTES
from common.engine.graphs.rules import PhaseSwitch
from common.node.graph_start import graph_trial
from prefill_node.graphs import prompt_graphs
from prefill_node.graphs.backends.compiled_body import CompiledBodies
from tests.unit.engine.graphs.rig import DeviceDriver, model, sequences

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUBLAS_BYTES = 128 << 20  # its workspaces, one per stream, stay with the process


@pytest.mark.parametrize("graphs", ["breakable", "piecewise"])
def test_a_trial_reserves_enough_and_leaves_nothing(graphs: str) -> None:
    """Row B8: the trial's figure suffices for the graphs, and its memory is freed."""
    driver = DeviceDriver(model(device=torch.device("cuda")), sequences([9]), 4)
    wanted = PhaseSwitch(graphs), 2048, 8, CaptureHiddenMode.FULL, CompiledBodies()
    made = prompt_graphs.prefill_graphs(driver.runner, *wanted)
    shapes = len(made.forward.graphs.spec.shapes)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    told = graph_trial(lambda: [prompt_graphs.prefill_graphs(driver.runner, *wanted)])
    after = torch.cuda.memory_reserved()
    assert told >= GRAPH_BYTES * shapes
    assert after - before < CUBLAS_BYTES
    made.forward.graphs.capture()
    assert not [row.error for row in made.forward.graphs.rows if row.error]
    held = torch.cuda.memory_reserved()
    torch.cuda.empty_cache()
    left = held - torch.cuda.memory_reserved()
    assert left < 4 << 20  # from warm-ups on a stream that nothing else uses
    assert torch.cuda.memory_reserved() - after <= told + CUBLAS_BYTES
