"""Which phases run under graphs on which node: rules that a node meets, and rules that refuse a start."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from common.checkpoint.model_config import ModelConfig
from common.checkpoint.model_files import weight_paths
from common.config import Resolved, load_cluster
from common.config.foreign import FOREIGN
from common.engine.forward.batch import CaptureHiddenMode
from common.engine.graphs.backends.full import FullGraphs
from common.engine.graphs.backends.none import NoGraphs
from common.engine.graphs.rules import (
    RULES,
    Decision,
    Phase,
    PhaseSwitch,
    StartupFacts,
    decide,
)
from common.errors import ConfigError, ModelError
from decode_node.graphs.step_graphs import round_plans, step_backend
from prefill_node.graphs.backends.breakable import BreakableGraphs
from prefill_node.graphs.backends.choice import prompt_backend
from prefill_node.graphs.prompt_graphs import prefill_graphs
from tests.unit.engine.graphs.rig import model
from tests.unit.engine.paged_driver import Driver

PLAIN, ON_CPU = StartupFacts("cuda"), StartupFacts("cpu")
AUTO = PhaseSwitch()
# The sixteen conditions, by number: rules of a node, options that a config may not have, and architectures.
DECIDED = {5: "device", 8: "multimodal"}
REFUSED = {
    2: "enable_dp_attention",
    3: "enable_torch_compile",
    4: "pp",
    6: "moe_a2a_backend",
    7: "enable_lora",
    8: "enable_multimodal",
    9: "load_format",
    10: "dllm_algorithm",
    11: "cpu_offload_gb",
    12: "enable_deterministic_inference",
    13: "disaggregation_mode",
    14: "enable_symm_mem",
    15: "enable_eplb",
    16: "attn_cp_size",
}
UNDECIDED = {1: "DeepseekV3ForCausalLM", 8: "Llama4ForConditionalGeneration"}


def cluster(tmp_path: Path, text: str) -> Resolved:
    file = tmp_path / "cluster.yaml"
    file.write_text("model: {path: m}\n" + text)
    return load_cluster(file, (), {})


def test_each_of_the_sixteen_rules_is_decided_or_refuses_by_name() -> None:
    """Row B3: none is left out, and none is listed that nothing could meet."""
    assert {rule.name for rule in RULES} == set(DECIDED.values())
    assert set(REFUSED.values()) <= {name for each in FOREIGN for name in each.names}
    assert {*DECIDED, *REFUSED, *UNDECIDED} == set(range(1, 17))
    assert all(rule.reason for rule in RULES)


@pytest.mark.parametrize("section", ["", "prefill", "decode", "process"])
@pytest.mark.parametrize("option", REFUSED.values())
def test_what_tandem_does_not_have_refuses_the_config(option: str, section: str, tmp_path: Path) -> None:
    """Rows B3 (2-4, 6-16): by the option's name, wherever it occurs, with what to write instead."""
    foreign = next(each for each in FOREIGN if option in each.names)
    for name in foreign.names:
        text = f"{name}: 1\n" if not section else f"{section}: {{{name}: 1}}\n"
        with pytest.raises(ConfigError) as refused:
            cluster(tmp_path, text)
        assert refused.value.path == (f"{section}.{name}" if section else name)
        assert foreign.answer in str(refused.value)


@pytest.mark.parametrize("rule", UNDECIDED)
def test_what_no_model_code_captures_refuses_the_checkpoint(rule: int, tmp_path: Path) -> None:
    """Row B3 (1, 8): by the architecture's name; there is no forward that could run eagerly instead."""
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [UNDECIDED[rule]]}))
    with pytest.raises(ModelError, match=rf"architecture {UNDECIDED[rule]} is not supported; supported are "):
        ModelConfig.load(tmp_path)


def test_gguf_files_refuse_the_checkpoint(tmp_path: Path) -> None:
    """Row B3 (9), the check of the checkpoint's files."""
    (tmp_path / "model-q4.gguf").touch()
    with pytest.raises(ModelError, match=r"found model-q4.gguf; supported weights are model.safetensors"):
        weight_paths(tmp_path)


@pytest.mark.parametrize("device", ["mps", "xpu", "hip:0", "npu"])
@pytest.mark.parametrize("section", ["prefill", "decode"])
def test_other_devices_refuse_the_config(section: str, device: str, tmp_path: Path) -> None:
    """Row B3 (5): these devices have neither CUDA graphs nor kernels."""
    with pytest.raises(ConfigError, match=f"'{device}' is not a device; write cpu, cuda or cuda:N"):
        cluster(tmp_path, f"{section}: {{nodes: [{{name: a, device: '{device}'}}]}}\n")


@pytest.mark.parametrize(
    ("text", "backend", "reasons"),
    [
        ("{}", "none", (f"device: {RULES[0].reason}",)),
        ("{graphs: breakable}", "breakable", ()),
        ("{enforce_graphs: true}", "breakable", ("enforced",)),
        ("{graphs: piecewise, enforce_graphs: true}", "piecewise", ("enforced",)),
        ("{graphs: none}", "none", ("prefill.graphs is none",)),
    ],
)
def test_a_node_on_a_cpu_by_its_config(
    text: str, backend: str, reasons: tuple[str, ...], tmp_path: Path
) -> None:
    """Rows B3 (5), B2: from the file to what would be captured."""
    section = cluster(tmp_path, f"prefill: {text}\n").cluster.prefill
    switch = PhaseSwitch(section.graphs, section.enforce_graphs)
    runner = Driver(model(), [torch.zeros(8, dtype=torch.int64)], 4).runner
    node = prefill_graphs(runner, switch, 8, 2, CaptureHiddenMode.NULL)
    assert node.decision == Decision(Phase.PREFILL, backend, reasons)
    assert bool(node.forward.graphs.spec.shapes) == (backend != "none")
    plan = round_plans(runner, AUTO, 4)(Phase.VERIFY)
    assert (plan.decision.backend, plan.buckets) == ("none", ()), "decode has a switch of its own"


def test_enforce_beats_every_rule() -> None:
    """Row B2. On a GPU `auto` needs no enforcing; a vision part whose attention needs the host meets rule 8 there."""
    for phase in (Phase.PREFILL, Phase.DRAFT_PREFILL, Phase.ENCODER):
        refused = decide(phase, StartupFacts("cpu", needs_host=True), AUTO)
        assert (refused.backend, len(refused.reasons)) == ("none", len(RULES))
        assert (
            decide(phase, StartupFacts("cpu", needs_host=True), PhaseSwitch(enforce=True)).backend != "none"
        )
    assert (
        decide(Phase.ENCODER, StartupFacts("cuda", needs_host=True), PhaseSwitch("breakable")).backend
        == "none"
    )
    assert decide(Phase.PREFILL, PLAIN, PhaseSwitch("none", enforce=True)).backend == "breakable"


def test_enforce_and_none_contradict_each_other(tmp_path: Path) -> None:
    """Row B2: enforcing overrides rules but not the config itself."""
    with pytest.raises(ConfigError, match="prefill.enforce_graphs: true contradicts prefill.graphs none"):
        cluster(tmp_path, "prefill: {graphs: none, enforce_graphs: true}\n")


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (
            "disable_cuda_graph: true",
            "decode steps; write decode.graphs: none .prefill.graphs is for prompts",
        ),
        ("prefill: {disable_cuda_graph: true}", "decode steps; write decode.graphs: none"),
        ("decode: {disable-cuda-graph: true}", "decode steps; write decode.graphs: none"),
        ("decode: {enforce_eager: true}", "write prefill.graphs: none and decode.graphs: none"),
        ("prefill: {disable_piecewise_cuda_graph: true}", "write prefill.graphs: none"),
        ("prefill: {enforce_piecewise_cuda_graph: true}", "write prefill.enforce_graphs"),
        ("prefill: {enable_return_hidden_states: true}", "write model.return_hidden_states: true"),
        ("decode: {tp_size: 2}", "write `tensor_parallel: N` in the entry of each node"),
        ("decode: {enable_two_batch_overlap: true}", "two overlapping halves: tandem has none"),
    ],
)
def test_names_of_other_servers_are_answered(text: str, answer: str, tmp_path: Path) -> None:
    """Row A10: the single flag of old configs means only decode graphs, and the answer says so."""
    with pytest.raises(ConfigError, match=f"it is an option of other servers: .*{answer}"):
        cluster(tmp_path, text + "\n")


def test_names_of_other_servers_are_answered_on_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text("model: {path: m}\n")
    for override in ("prefill.enable_lora=true", "--enable-lora"):
        with pytest.raises(ConfigError, match="LoRA adapters: tandem has none"):
            load_cluster(file, [override], {})


@pytest.mark.parametrize("text", ["prefill: {graphs: full}", "decode: {graphs: breakable}"])
def test_a_role_has_no_graphs_of_the_other(text: str, tmp_path: Path) -> None:
    """tests/unit/engine/test_roles.py shows what each role is composed of."""
    with pytest.raises(ConfigError, match=r"graphs: Invalid enum value '(full|breakable)'; write auto, "):
        cluster(tmp_path, text + "\n")


def test_speculation_is_not_a_rule() -> None:
    """Rows B1, B7: speculation as such switches nothing off; a drafter's prompts run under breakable graphs as well.

    Row A8's force flag is construction order here: a drafter's graphs are captured after its head is shared.
    """
    assert not [rule for rule in RULES if "spec" in rule.name or "draft" in rule.name]
    assert decide(Phase.DRAFT_PREFILL, PLAIN, AUTO).backend == "breakable"


@pytest.mark.parametrize("enforce", [False, True])
def test_a_draft_is_never_captured_piecewise(enforce: bool) -> None:
    """Rows B5, A8: the target is, next to a draft under breakable graphs; the table says so."""
    switch = PhaseSwitch("piecewise", enforce)
    assert decide(Phase.PREFILL, PLAIN, switch).backend == "piecewise"
    draft = decide(Phase.DRAFT_PREFILL, PLAIN, switch)
    assert draft.backend == "breakable"
    assert draft.reasons[-1] == "piecewise: only for the target's prompts"


@pytest.mark.parametrize("wanted", ["auto", "full", "breakable", "piecewise"])
def test_images_are_captured_full_or_not_at_all(wanted: str) -> None:
    """Row B5: there are no lengths for a break to read; `none` for prompts means none here."""
    assert decide(Phase.ENCODER, PLAIN, PhaseSwitch(wanted)) == Decision(Phase.ENCODER, "full")
    assert decide(Phase.ENCODER, PLAIN, PhaseSwitch("none")).backend == "none"


def test_switches_are_per_phase() -> None:
    """Row A10: switching decode off leaves prompts as they are, and the other way round."""
    off = PhaseSwitch("none")
    sections = {"prefill": "prefill", "draft_prefill": "prefill", "encoder": "prefill"}
    for phase in Phase:
        section = sections.get(phase, "decode")
        assert decide(phase, PLAIN, off).reasons == (f"{section}.graphs is none",)
        assert decide(phase, PLAIN, AUTO).backend != "none"


def test_poisoned_padding_is_named_as_a_reason() -> None:
    assert decide(Phase.DECODE, PLAIN, PhaseSwitch(poisoned=True)).reasons == ("padding is poisoned",)
    assert decide(Phase.DECODE, ON_CPU, PhaseSwitch(poisoned=True)).reasons == (f"device: {RULES[0].reason}",)


def test_backends_by_name_on_the_cpu() -> None:
    cpu = torch.device("cpu")
    full, breakable = prompt_backend("full", cpu), prompt_backend("breakable", cpu)
    assert isinstance(full, FullGraphs)
    assert isinstance(breakable, BreakableGraphs)
    assert isinstance(prompt_backend("none", cpu), NoGraphs)
    assert (full.name, breakable.name) == ("tape", "breakable-tape")
    assert prompt_backend("piecewise", cpu).name == "piecewise-eager-tape"
    with pytest.raises(ValueError, match="write none, full, breakable or piecewise"):
        prompt_backend("paged", cpu)
    assert isinstance(step_backend("full", cpu), FullGraphs)
    assert isinstance(step_backend("none", cpu), NoGraphs)
    with pytest.raises(ValueError, match="write none or full"):
        step_backend("breakable", cpu)
