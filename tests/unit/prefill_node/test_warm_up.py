"""The warm-up before serving runs every head and writes no page that a request may have."""

from __future__ import annotations

from typing import cast

import pytest
import torch

from common.engine.attention.paged import PagedAttention
from common.engine.forward.batch import CaptureHiddenMode, ForwardBatch, ForwardOutput
from common.engine.forward.draft_runner import DraftRunner
from common.engine.forward.model_runner import ModelRunner
from common.engine.forward.mtp_runner import MtpRunner
from common.engine.graphs.rules import PhaseSwitch
from common.engine.layers.logit_rows import LogitRows
from prefill_node import measure
from prefill_node.draft import EaglePrefill, NoDraft
from prefill_node.graphs import prompt_graphs
from prefill_node.graphs.prefill_extend import PrefillExtend
from prefill_node.measure import MeasuredNode, measure_forwards, measured_sizes
from prefill_node.mtp import MtpPrefill
from prefill_node.warm_up import warm_up
from tests.fakes.clock import Clock
from tests.fakes.draft_models import DRAFTS, DraftModel
from tests.fakes.mtp_models import MtpModel
from tests.fakes.pools import model_pool, plain_pool
from tests.fakes.tiny_model import CONFIG, PLACEMENT, tiny_model

PAGE, PAGES = 4, 3


@pytest.mark.parametrize("wanted", ["none", "breakable", "piecewise"])
def test_pools_stay_as_they_were(wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    draft = DraftModel("eagle3")
    model = tiny_model(aux=draft.aux_layers)
    pool = model_pool(CONFIG, PAGE, PAGES, PLACEMENT)
    draft_pool = plain_pool(
        1, CONFIG.num_kv_heads, CONFIG.head_dim, PAGE, PAGES, PLACEMENT.dtype, PLACEMENT.device
    )
    runner = ModelRunner(model, pool, PagedAttention(pool, CONFIG.sliding_windows))
    target = prompt_graphs.prefill_graphs(runner, PhaseSwitch(wanted), 8, 2, CaptureHiddenMode.FULL)
    head = draft.serving().runner(draft_pool, PagedAttention)
    assert isinstance(head, DraftRunner)
    plan = prompt_graphs.DraftPrefillPlan(runner, PhaseSwitch(wanted), 8)
    drafting = prompt_graphs.draft_head_graphs(head, DRAFTS["eagle3"], plan)
    for each in (target, drafting):
        each.forward.graphs.capture()
    rows = []
    for owner, name in ((model, "logit_rows"), (head.head, "compute_logits")):
        compute = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda x, compute=compute: (rows.append(len(x)), compute(x))[1])
    planes = [pool.key(0), pool.value(1), draft_pool.key(0), draft_pool.value(0)]
    before = [plane.fill_(7).clone() for plane in planes]
    warm_up(target.forward, EaglePrefill(drafting.forward), PAGE, PLACEMENT.device, prompts=(1, 3))
    assert rows == [1, 1, 3, 3], "both heads run for each number of prompts"
    node = MeasuredNode(8, 16, CONFIG.vocab_size, PAGE, PLACEMENT.device)
    measured = measure_forwards(target.forward, EaglePrefill(drafting.forward), node)
    assert list(measured.by_tokens) == measured_sizes(8) == [8]
    assert node.batch(2, 14).seq_lens_host == (16,)
    # Page 0 is the padding page.
    assert all(torch.equal(plane[1:], old[1:]) for plane, old in zip(planes, before, strict=True))


def test_sizes_between_powers_of_two_are_measured_up_to_the_largest_forward() -> None:
    assert measured_sizes(100) == [16, 24, 32, 48, 64, 96, 100]


def test_every_mtp_module_runs() -> None:
    draft, pool = MtpModel("mtp", 3), model_pool(CONFIG, PAGE, PAGES, PLACEMENT)
    layers = (3, CONFIG.num_kv_heads, CONFIG.head_dim, PAGE, PAGES)
    draft_pool = plain_pool(*layers, PLACEMENT.dtype, PLACEMENT.device)
    runner = ModelRunner(tiny_model(), pool, PagedAttention(pool, CONFIG.sliding_windows))
    off = PhaseSwitch("none")
    target = prompt_graphs.prefill_graphs(runner, off, 8, 2, CaptureHiddenMode.FULL)
    plan = prompt_graphs.DraftPrefillPlan(runner, off, 8)
    modules = draft.serving().runner(draft_pool, PagedAttention)
    assert isinstance(modules, MtpRunner)
    drafting = prompt_graphs.draft_module_graphs(modules, draft.config, plan)
    forwards = [each.forward for each in drafting]
    prefill = MtpPrefill(forwards, PAGE, CONFIG.hidden_size)
    warm_up(target.forward, prefill, PAGE, PLACEMENT.device, prompts=(1, 3))
    assert [each.graphs.counters.fallbacks.total() for each in forwards] == [2, 2, 2]
    node = MeasuredNode(8, 16, CONFIG.vocab_size, PAGE, PLACEMENT.device)
    assert list(measure_forwards(target.forward, prefill, node).by_tokens) == [8]


def test_a_disturbance_at_the_start_of_a_node_makes_no_size_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven forwards in a row take ten times as long as otherwise."""
    clock, ran = Clock(0.0), 0

    def forward(batch: ForwardBatch) -> ForwardOutput:
        nonlocal ran
        ran += 1
        clock.now += len(batch.input_ids) / 1e3 * (10 if 9 <= ran < 16 else 1)
        return ForwardOutput(LogitRows(torch.zeros(1, 1)))

    class Watch:
        """A stopwatch on the test's clock."""

        def __init__(self) -> None:
            self.began = self.ended = clock.now

        def lap(self) -> None:
            self.ended = clock.now

        def seconds(self) -> list[float]:
            return [self.ended - self.began]

    monkeypatch.setattr(measure, "stopwatch_for", lambda device: Watch)
    node = MeasuredNode(100, 100, CONFIG.vocab_size, PAGE, PLACEMENT.device)
    measured = measure_forwards(cast(PrefillExtend, forward), NoDraft(), node)
    assert measured.by_tokens == pytest.approx({tokens: float(tokens) for tokens in measured_sizes(100)})
