"""Draft prefill under CUDA graphs gives the same drafts, states and draft KV as eager runs, for any mix of prompts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from common.checkpoint.draft_config import target_width
from common.engine.attention.paged import PagedAttention
from common.engine.forward.batch import CaptureHiddenMode
from common.engine.forward.draft_runner import DraftRunner
from common.engine.graphs.backends.base import Backend
from common.engine.graphs.backends.cuda import CudaRecorder
from common.engine.layers.placement import Placement
from prefill_node.graphs.backends.breakable import BreakableGraphs
from prefill_node.graphs.draft_prefill import DraftPrefill, draft_prefill_spec
from tests.fakes.draft_models import DRAFTS, new_head
from tests.fakes.pools import plain_pool
from tests.unit.engine.graphs.rig import DeviceDriver, model, sequences

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
GPU = torch.device("cuda")
LENGTHS = (60, 41, 23, 9)
# (sequences, new tokens of each): below, at and above the largest graph, growing and shrinking
STEPS = [
    ([0, 1], [20, 7]),
    ([0, 2, 1], [5, 3, 8]),
    ([3], [8]),
    ([0, 1, 2], [28, 17, 20]),
    ([0], [7]),
    ([1, 3], [9, 1]),
]


@pytest.mark.parametrize("poisoned", [False, True])
@pytest.mark.parametrize("name", ["eagle3", "eagle3-window", "eagle", "mtp-one-module"])
def test_replay_equals_eager(name: str, poisoned: bool) -> None:
    """Rows A3, A5, A6: every batch gives the eager results."""
    compare(name, poisoned, GPU, BreakableGraphs(CudaRecorder(GPU)))


def compare(name: str, poisoned: bool, device: torch.device, backend: Backend) -> None:
    config = DRAFTS[name]
    config = replace(config, model=replace(config.model, head_dim=16))  # the kernels support this size
    target = model(config.aux_layers, device=device)
    placement = Placement(torch.float32, device)
    head = new_head(name, config, target, placement).eval()
    shared = {parameter.data_ptr() for parameter in target.parameters()}
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.data_ptr() not in shared:
                parameter.normal_(std=0.3)
    driver = DeviceDriver(target, sequences(LENGTHS), 4)
    layers = config.model.num_layers
    pools = [
        plain_pool(layers, config.model.num_kv_heads, 16, 4, driver.pool.num_pages, torch.float32, device)
        for _ in range(2)
    ]
    eager, inner = (
        DraftRunner(head, PagedAttention(pool, config.model.sliding_windows), topk=3) for pool in pools
    )
    graphed = DraftPrefill(inner, config, 4, draft_prefill_spec((4, 8, 16, 32, 48)), backend, poisoned)
    graphed.graphs.capture()
    assert not [row.error for row in graphed.graphs.rows if row.error]
    for rows, lengths in STEPS:
        batch = driver.batch(rows, lengths, hidden_mode=CaptureHiddenMode.FULL)
        batch = replace(batch, logits_rows=(batch.query_start[1:] - 1).to(torch.int64))
        hidden = torch.randn(sum(lengths), target_width(config), device=device)
        actual, expected = graphed(batch, hidden), eager.extend(batch, hidden)
        assert torch.equal(actual.draft_topk_ids[:, 0], expected.draft_topk_ids[:, 0])
        torch.testing.assert_close(actual.draft_topk_probs, expected.draft_topk_probs, atol=1e-4, rtol=0)
        torch.testing.assert_close(actual.hidden, expected.hidden, atol=1e-3, rtol=0)
        driver.run(rows, lengths)
    for ours, theirs in zip(
        *([pool.key(layer)[1:] for layer in range(layers)] for pool in pools), strict=True
    ):
        torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=0)
    assert graphed.graphs.counters.replays.total() == len(STEPS) - 1
