"""`process.poison_graphs` reaches the static inputs of every captured forward of both nodes.

The nodes of tests/fakes/node_cluster.py, which are all poisoned, show that no token depends on it, and so does
tests/cluster/test_graphs.py, starting from the cluster file.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from common.engine.attention.paged import PagedAttention
from common.engine.forward.batch import CaptureHiddenMode, ForwardMode
from common.engine.forward.model_runner import ModelRunner
from common.engine.graphs import node_graphs
from common.engine.graphs.rules import Phase, PhaseSwitch
from common.engine.state.relay_state import RelayState
from decode_node.graphs import step_graphs
from decode_node.page_table import PageTable
from decode_node.speculative.rounds import NOTHING, Nothing, PhaseForward, Rounds
from prefill_node.draft import DraftSetup
from prefill_node.draft_table import make_draft
from prefill_node.graphs import prompt_graphs
from tests.fakes.draft_models import DraftModel, StandaloneModel
from tests.fakes.mtp_models import MtpModel
from tests.fakes.pools import plain_pool
from tests.fakes.tiny_model import CONFIG, PLACEMENT
from tests.unit.engine.graphs.rig import model
from tests.unit.engine.paged_driver import Driver

CPU, PAGE = torch.device("cpu"), 4


def prompt_forwards(runner: ModelRunner, wanted: PhaseSwitch) -> list[node_graphs.NodeGraphs[Any]]:
    made: list[node_graphs.NodeGraphs[Any]] = [
        prompt_graphs.prefill_graphs(runner, wanted, 4, 1, CaptureHiddenMode.NULL)
    ]
    plan = prompt_graphs.DraftPrefillPlan(runner, wanted, 4)
    drafts = (
        (DraftModel("eagle3"), 1),
        (MtpModel("mtp", 2), 2),
        (StandaloneModel(), 2),
    )
    for draft, layers in drafts:
        pool = plain_pool(layers, CONFIG.num_kv_heads, CONFIG.head_dim, PAGE, 2, PLACEMENT.dtype, CPU)
        loaded = draft.serving()
        made += make_draft(
            draft.algorithm, DraftSetup(loaded.runner(pool, PagedAttention), loaded.config, plan)
        ).graphs
    return made


@pytest.mark.parametrize("poisoned", [False, True])
def test_every_forward_of_a_node_has_poisoned_padding_or_none_has(poisoned: bool) -> None:
    """The image encoders have their own tests of this."""
    wanted = PhaseSwitch("breakable", poisoned=poisoned)
    runner = Driver(model(), [torch.zeros(8, dtype=torch.int64)], PAGE).runner
    relay, table = RelayState.allocate(2, runner.model.config.vocab_size, CPU), PageTable(2, 16, CPU)
    made = prompt_forwards(runner, wanted)
    made.append(
        step_graphs.decode_graphs(runner, relay, table, PhaseSwitch("full", poisoned=poisoned), 2, 16)
    )
    plans = step_graphs.round_plans(runner, PhaseSwitch("full", poisoned=poisoned), 2)
    rounds = Rounds(relay, table, PAGE, 16, 2, plans)
    made += [
        rounds.phase(
            phase, "draft", lambda *given: Nothing(), NOTHING, PhaseForward(ForwardMode.DECODE)
        ).node_graphs
        for phase in (Phase.DRAFT, Phase.VERIFY, Phase.DRAFT_EXTEND)
    ]
    assert len(made) == 1 + (1 + 2 + 1) + 1 + 3
    for each in made:
        assert each.forward.graphs.inputs.poisoned is poisoned, each.decision
        assert each.decision.reasons == ("padding is poisoned",) * poisoned
