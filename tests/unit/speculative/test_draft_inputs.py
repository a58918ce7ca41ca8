"""The inputs of draft, verify and draft-extend: one source of widths for buffers, idle batches and relay rows."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from common.checkpoint.aux_layers import AuxLayers
from common.checkpoint.draft_config import proposals_for
from common.checkpoint.model_config import ModelConfig
from common.engine.forward.batch import CaptureHiddenMode
from common.engine.forward.draft_inputs import DraftExtendInput, DraftInput, TreeVerifyInput
from common.engine.layers.placement import Placement
from common.engine.models.eagle import EMBEDDING, Eagle3Head
from common.messages.generation import SamplingParams
from common.speculation.directory import load_draft_config
from tests.fakes.draft_models import DRAFTS
from tests.fakes.mtp_models import mtp_config
from tests.fakes.tiny_model import CONFIG, PLACEMENT, tiny_model
from tests.unit.engine.graphs.rig import BACKENDS
from tests.unit.speculative.rig import Kind, RoundRig, prompts_of

ROOT = Path(__file__).resolve().parents[3]
MODELS = ROOT / "deploy" / "tiny_models"
CPU = torch.device("cpu")
LAST, FULL = CaptureHiddenMode.LAST, CaptureHiddenMode.FULL


@pytest.mark.parametrize(
    ("name", "algorithm", "draft", "extend"),
    [
        ("tiny-eagle3", "eagle3", 256, 3 * 256),
        ("tiny-eagle", "eagle", 256, 256),
        ("tiny-standalone", "standalone", 0, 0),
    ],
)
def test_widths_of_the_shipped_drafts(name: str, algorithm: str, draft: int, extend: int) -> None:
    """Rows D1, D3, D4, D8: the draft feeds itself its own width, the target gives it concatenated aux layers."""
    config = load_draft_config(MODELS / name, algorithm, ModelConfig.load(MODELS / "tiny-target"))
    assert DraftInput.hidden_size_for(config) == draft
    assert DraftExtendInput.hidden_size_for(config) == extend


@pytest.mark.parametrize("states", [1, 2, 3, 4])
def test_as_many_aux_states_as_the_head_reads(states: int) -> None:
    """Rows D1, D4: each state has the target's width, whatever the head's own; the projection takes all of them."""
    config = replace(DRAFTS["eagle3-narrow"], aux=AuxLayers(tuple(range(states))), fc_norms=())
    assert DraftInput.hidden_size_for(config) == 24
    assert DraftExtendInput.hidden_size_for(config) == states * CONFIG.hidden_size
    head = Eagle3Head(config, tiny_model(), PLACEMENT, (EMBEDDING,))
    assert head.project(torch.zeros(5, states * CONFIG.hidden_size)).shape == (5, 24)


def test_without_a_draft_model_nothing_travels() -> None:
    """Row D8: n-gram drafting transfers no draft state."""
    assert DraftInput.hidden_size_for(None) == DraftExtendInput.hidden_size_for(None) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("name", "kept"), [("mtp", 32), ("mtp-narrow", 24), ("mtp-no-chain-narrow", 32)])
def test_idle_inputs_of_modules_hold_the_proposals_of_every_step(
    name: str, kept: int, dtype: torch.dtype
) -> None:
    """Rows D6, D10: an idle batch has the widths of a live one.

    The buffer holds top-k times steps proposals, and for each module but the first the hidden state that it reads: of
    the modules' width in a chain, else of the target's. An extension reads the target's width.
    """
    config, place = mtp_config(name, 3), Placement(dtype, CPU)
    width, wide = DraftInput.carried_size_for(config), DraftExtendInput.hidden_size_for(config)
    idle = DraftInput.zeros(0, proposals_for(config, 1), width, DraftInput.dtype_for(place), CPU)
    assert (idle.draft_topk_probs.shape, idle.draft_topk_ids.shape) == ((0, 3), (0, 3))
    assert (idle.hidden.shape, idle.hidden.dtype) == ((0, 2 * kept), dtype)
    extend = DraftExtendInput.zeros(2, 4, wide, DraftExtendInput.dtype_for(place), CPU).first(0)
    assert (extend.hidden.shape, extend.hidden.dtype) == ((0, 4, CONFIG.hidden_size), dtype)
    assert idle.hidden_mode is extend.hidden_mode is LAST


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_idle_inputs_have_no_rows_and_every_width(dtype: torch.dtype) -> None:
    """Row D6: idle inputs have device, width, dtype, top-k and hidden mode LAST, with zero rows."""
    config, place = DRAFTS["eagle3"], Placement(dtype, CPU)
    draft = DraftInput.zeros(0, 4, DraftInput.hidden_size_for(config), DraftInput.dtype_for(place), CPU)
    assert (draft.draft_topk_probs.shape, draft.draft_topk_ids.shape) == ((0, 4), (0, 4))
    assert (draft.hidden.shape, draft.hidden.dtype) == ((0, CONFIG.hidden_size), dtype)
    width = DraftExtendInput.hidden_size_for(config)
    extend = DraftExtendInput.zeros(0, 5, width, DraftExtendInput.dtype_for(place), CPU)
    assert (extend.hidden.shape, extend.hidden.dtype) == ((0, 5, 3 * CONFIG.hidden_size), dtype)
    assert draft.hidden_mode is extend.hidden_mode is LAST
    idle = TreeVerifyInput.zeros(7, 3, CPU).first(0)
    assert [tuple(each.shape) for each in (idle.tokens, idle.depth, idle.mask)] == [(0, 3), (0, 3), (0, 3, 3)]


@pytest.mark.parametrize("name", DRAFTS)
def test_graph_buffers_and_relay_rows_have_these_widths(name: str) -> None:
    """Rows D2, D7, A4: buffers of the three phases, the relay rows, and the hidden states that verify returns."""
    rig = RoundRig(Kind(name, 3), prompts_of([5, 9]), [_greedy()] * 2, BACKENDS["tape"], (2,))
    extend = rig.drafter.state.walk.hidden
    assert extend.shape[1:] == (4, DraftExtendInput.hidden_size_for(DRAFTS[name]))
    assert extend.dtype is DraftExtendInput.dtype_for(PLACEMENT)
    assert rig.relay.draft.hidden.shape[1] == DraftInput.hidden_size_for(DRAFTS[name])
    assert rig.relay.draft.hidden.dtype is DraftInput.dtype_for(PLACEMENT)
    assert rig.drafter.hidden_mode is rig.verify.phase.graphs.spec.hidden is FULL
    rig.round([0, 1])
    assert extend[:2].abs().sum(-1).gt(0).all()


def test_a_width_that_differs_raises() -> None:
    """Hidden states that do not fit their buffer must raise; a replay with old ones would be silently wrong."""
    rig = RoundRig(Kind("eagle3", 3), prompts_of([5]), [_greedy()], BACKENDS["tape"], ())
    wide = rig.drafter.state.walk.hidden.shape[-1] + 8
    object.__setattr__(rig.drafter.state.walk, "hidden", torch.zeros(rig.rounds.max_rows, 4, wide))
    with pytest.raises(RuntimeError, match="must match the size"):
        rig.round([0])


def test_no_other_file_computes_a_width() -> None:
    """Row D2: only the width functions compute `hidden_size * 3`."""
    allowed = {"common/checkpoint/draft_config.py", "common/engine/forward/draft_inputs.py"}
    pattern = re.compile(
        r"\btarget_width\(|draft_config\.hidden_size_for|len\(\w*\.?aux_layers\)|hidden_size \* 3"
    )
    places = [
        path.relative_to(ROOT).as_posix()
        for folder in ("common", "prefill_node", "decode_node", "kv_transfer")
        for path in (ROOT / folder).rglob("*.py")
        if pattern.search(path.read_text())
    ]
    assert set(places) <= allowed, places


def _greedy() -> SamplingParams:
    return SamplingParams(max_tokens=99, temperature=0.0)
