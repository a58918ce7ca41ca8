"""What runs under graphs on which node, decided at start-up."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from common.engine.cuda_graph import rules
from common.engine.cuda_graph.backends.breakable import BreakableGraphs
from common.engine.cuda_graph.backends.choice import make_backend
from common.engine.cuda_graph.backends.full import FullGraphs
from common.engine.cuda_graph.backends.none import NoGraphs
from common.engine.cuda_graph.node_graphs import round_plans
from common.engine.cuda_graph.rules import (
    PHASES,
    RULES,
    Decision,
    Phase,
    PhaseSwitch,
    StartupFacts,
    decide,
    legacy_switches,
    unsupported,
)
from common.vision_config import ARCHITECTURES

PLAIN = StartupFacts("prefill", "cuda")
AUTO = PhaseSwitch()
# rule of row B3 -> facts under which it applies
APPLIES: dict[int, dict[str, Any]] = {
    1: {"architecture": "Uncapturable"},
    2: {"attention_data_parallel": True},
    3: {"torch_compile": True},
    4: {"pipeline_stages": 2},
    5: {"device": "mps"},
    6: {"moe_all_to_all": "deepep"},
    7: {"lora": True},
    8: {"multimodal": True},
    9: {"weights": "gguf"},
    10: {"diffusion": True},
    11: {"hierarchical_cache": True},
    12: {"deterministic": True},
    14: {"symmetric_memory": True},
    15: {"expert_recorder": True},
    16: {"context_parallel": 2},
}


@pytest.fixture(autouse=True)
def _deny_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "DENIED_ARCHITECTURES", frozenset(("Uncapturable",)))


def test_the_table_has_the_sixteen_rules() -> None:
    """Row B3."""
    assert [rule.number for rule in RULES] == list(range(1, 17))
    assert len({rule.name for rule in RULES}) == 16
    assert all(rule.reason for rule in RULES)
    assert set(APPLIES) | {13} == {rule.number for rule in RULES}


@pytest.mark.parametrize("number", APPLIES, ids=[f"B3-{number}" for number in APPLIES])
def test_each_rule_alone_turns_graphs_off_with_its_reason(number: int) -> None:
    """Row B3, and row B2: enforce beats it."""
    facts = replace(PLAIN, **APPLIES[number])
    decision = decide(Phase.PREFILL, facts, AUTO)
    assert decision.backend == "none"
    assert decision.reasons == (f"{RULES[number - 1].name}: {RULES[number - 1].reason}",)
    assert decide(Phase.PREFILL, facts, PhaseSwitch(enforce=True)).backend == "breakable"
    assert [rule.number for rule in unsupported(facts)] == ([] if RULES[number - 1].exists else [number])


def test_offloaded_weights_are_rule_11_too() -> None:
    assert "offload" in decide(Phase.PREFILL, replace(PLAIN, offloaded_gib=0.5), AUTO).reasons[0]


def test_a_multimodal_model_on_the_allow_list_has_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Row X4."""
    facts = replace(PLAIN, multimodal=True, architecture="Seeing")
    assert decide(Phase.PREFILL, facts, AUTO).backend == "none"
    monkeypatch.setattr(rules, "MULTIMODAL_ALLOWED", frozenset(("Seeing",)))
    assert decide(Phase.PREFILL, facts, AUTO).backend == "breakable"


@pytest.mark.parametrize(
    ("architecture", "backend"), [("LlavaForConditionalGeneration", "full"), ("Unheard", "none")]
)
def test_a_model_that_sees_is_judged_by_its_own_name(architecture: str, backend: str) -> None:
    """Row B3 (8): the language model inside is on no list of models that see."""
    config = SimpleNamespace(
        architecture="LlamaForCausalLM", vision=SimpleNamespace(architecture=architecture)
    )
    model: Any = SimpleNamespace(config=config, placement=SimpleNamespace(device=torch.device("cpu")))
    decision = round_plans(SimpleNamespace(model=model), "full", 4)(Phase.VERIFY).decision  # type: ignore[arg-type]
    assert decision.backend == backend
    assert [reason.split(":")[0] for reason in decision.reasons] == ["multimodal"] * (backend == "none")


def test_the_models_that_see_are_on_the_list() -> None:
    """Row X4, C: their embeddings survive the replay, which tests/unit/prefill_node/test_vision.py shows."""
    for architecture in ARCHITECTURES:
        facts = replace(PLAIN, multimodal=True, architecture=architecture)
        assert decide(Phase.PREFILL, facts, AUTO).backend == "breakable"


@pytest.mark.parametrize("phase", Phase)
@pytest.mark.parametrize("role", PHASES)
@pytest.mark.parametrize("switch", [AUTO, PhaseSwitch(enforce=True), PhaseSwitch("full", enforce=True)])
def test_a_phase_that_the_role_lacks_is_never_captured(phase: Phase, role: str, switch: PhaseSwitch) -> None:
    """Rows X1, A10, L9, rule 13: by role, unconditionally; the other phases keep their graphs."""
    decision = decide(phase, StartupFacts(role, "cuda"), switch)
    assert decision.exists == (phase in PHASES[role])
    assert (decision.backend == "none") == (phase not in PHASES[role])
    assert decision.exists or decision.reasons == (f"a {role} node has no {phase} phase",)


def test_the_phases_of_the_two_roles_are_disjoint_and_all() -> None:
    assert not PHASES["prefill"] & PHASES["decode"]
    assert PHASES["prefill"] | PHASES["decode"] == set(Phase)
    assert RULES[12].applies(StartupFacts("unified", "cuda"))


def test_enforce_beats_rules_and_switch() -> None:
    """Row B2."""
    facts = replace(PLAIN, lora=True, pipeline_stages=4)
    assert len(decide(Phase.PREFILL, facts, AUTO).reasons) == 2
    assert decide(Phase.PREFILL, facts, PhaseSwitch("none", enforce=True)).backend == "breakable"
    assert decide(Phase.PREFILL, facts, PhaseSwitch("full", enforce=True)).backend == "full"


def test_speculation_is_not_a_rule() -> None:
    """Rows B1, B7, X2: no blanket and no allow-list; a drafter's prompts run under breakable graphs as well.

    Row A8's force flag is construction order here: a drafter's graphs are captured after its head is shared.
    """
    assert not [rule for rule in RULES if "spec" in rule.name or "draft" in rule.name]
    assert decide(Phase.DRAFT_PREFILL, PLAIN, AUTO).backend == "breakable"


@pytest.mark.parametrize("enforce", [False, True])
def test_a_draft_is_never_captured_piecewise(enforce: bool) -> None:
    """Rows B5, A8, X2: the target is, beside a draft under breakable graphs; the table says so."""
    switch = PhaseSwitch("piecewise", enforce)
    assert decide(Phase.PREFILL, PLAIN, switch).backend == "piecewise"
    draft = decide(Phase.DRAFT_PREFILL, PLAIN, switch)
    assert draft.backend == "breakable"
    assert draft.reasons[-1] == "piecewise: of the target's prompts alone"
    lora = decide(Phase.DRAFT_PREFILL, replace(PLAIN, lora=True), PhaseSwitch("piecewise"))
    assert lora.backend == "none"


@pytest.mark.parametrize("wanted", ["auto", "full", "breakable", "piecewise"])
def test_images_are_captured_full_or_not_at_all(wanted: str) -> None:
    """Rows B5, X4: there are no lengths for a break to read; `none` of prompts is none here."""
    assert decide(Phase.ENCODER, PLAIN, PhaseSwitch(wanted)) == Decision(Phase.ENCODER, "full")
    denied = replace(PLAIN, multimodal=True, architecture="Unheard")
    assert decide(Phase.ENCODER, denied, PhaseSwitch(wanted)).backend == "none"
    assert decide(Phase.ENCODER, PLAIN, PhaseSwitch("none")).backend == "none"


def test_switches_are_per_phase_and_the_legacy_flag_means_decode() -> None:
    """Rows X8, A10."""
    switches = legacy_switches(disable_cuda_graph=True)
    prefill, decode = PLAIN, StartupFacts("decode", "cuda")
    assert decide(Phase.PREFILL, prefill, switches[Phase.PREFILL]).backend == "breakable"
    assert decide(Phase.DRAFT_PREFILL, prefill, switches[Phase.DRAFT_PREFILL]).backend == "breakable"
    for phase in PHASES["decode"]:
        assert decide(phase, decode, switches[phase]).reasons == (f"graphs.{phase} is none",)
        assert decide(phase, decode, legacy_switches(disable_cuda_graph=False)[phase]).backend == "full"


def test_backends_by_name_on_the_cpu() -> None:
    cpu = torch.device("cpu")
    full, breakable = make_backend("full", cpu), make_backend("breakable", cpu)
    assert isinstance(full, FullGraphs)
    assert isinstance(breakable, BreakableGraphs)
    assert isinstance(make_backend("none", cpu), NoGraphs)
    assert (full.name, breakable.name) == ("tape", "breakable-tape")
    assert make_backend("piecewise", cpu).name == "piecewise-eager-tape"
    with pytest.raises(ValueError, match="write none, full, breakable or piecewise"):
        make_backend("paged", cpu)
