"""What each role is composed of, checked on nodes that `build` made: nothing of the other role."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import decode_node.build
import prefill_node.build
from common.config import load_cluster
from common.engine.graphs.graph_runner import GraphRunner
from common.engine.graphs.slots import StaticInputs
from common.engine.ops.ended_programs import ended_programs
from common.engine.state.relay_state import RelayState
from common.observability.logs import Log
from common.observability.startup import StartupReporter
from decode_node.graphs.decode_graph import DecodeGraphs
from decode_node.page_table import PageTable
from decode_node.speculative.rounds import RoundPhase, Rounds
from prefill_node.graphs.draft_prefill import DraftPrefill
from prefill_node.graphs.prefill_extend import PrefillExtend
from prefill_node.graphs.static_extend import StaticExtend

MODELS = Path(__file__).parents[3] / "deploy" / "tiny_models"
KINDS = (
    torch.Tensor,
    GraphRunner,
    StaticInputs,
    *(of_prompts := (PrefillExtend, DraftPrefill, StaticExtend)),
    *(of_decoding := (DecodeGraphs, Rounds, RoundPhase, RelayState, PageTable)),
)
FOREIGN: Mapping[str, tuple[type, ...]] = {"prefill": of_decoding, "decode": of_prompts}
PHASES = {
    "prefill": {"prefill"},
    "decode": {"decode", "verify", "draft", "draft_extend"},
}
SLOTS = {
    "prefill": {"embeds", "positions", "kv_slots", "ids", "hidden", "select"},
    "decode": {"rows", "placed", "drafts"},
}


@dataclass
class Held:
    """Objects that are alive because of one node."""

    objects: list[Any]

    def of(self, *kinds: type) -> list[Any]:
        return [each for each in self.objects if isinstance(each, kinds)]

    @property
    def nbytes(self) -> int:
        storages = {
            each.untyped_storage().data_ptr(): each.untyped_storage() for each in self.of(torch.Tensor)
        }
        return sum(storage.nbytes() for storage in storages.values())


@contextmanager
def built(role: str, tmp_path: Path, algorithm: str, **sizes: Mapping[str, Any]) -> Iterator[Held]:
    config: dict[str, Any] = {
        "model": {"path": str(MODELS / "tiny-target"), "max_model_len": 128},
        "prefill": {"graphs": "breakable", "pool_tokens": 256, "chunk_tokens": 4, "max_batch": 2},
        "decode": {"graphs": "full", "pool_tokens": 256, "max_running": 1, "max_transferring": 2},
        "process": {"run_dir": str(tmp_path / "run")},
    }
    if algorithm != "none":
        draft = {"algorithm": algorithm, "draft_model_path": str(MODELS / f"tiny-{algorithm}"), "steps": 2}
        config["speculation"] = draft
    for section, keys in sizes.items():
        config[section].update(keys)
    file = tmp_path / "cluster.yaml"
    file.write_text(yaml.safe_dump(config))
    log = Log("roles")
    build: Any = {"prefill": prefill_node.build.build, "decode": decode_node.build.build}[role]
    ended_programs(torch.device("cpu"))  # made once per process, and not a part of the first node
    gc.collect()
    # Unfreezing afterwards would undo what tests/conftest.py freezes, so nothing is frozen here. The list keeps older
    # objects alive: the address of one that is gone may become that of a part of the node.
    older = gc.get_objects()
    node = build(load_cluster(file, (), {}), f"{role}-0", StartupReporter(None, log), log)
    gc.collect()
    known = {*map(id, older), id(older)}
    held = Held(
        [each for each in gc.get_objects() if id(each) not in known and issubclass(type(each), KINDS)]
    )
    del older
    try:
        yield held
    finally:
        node.close()


@pytest.mark.parametrize(
    ("role", "algorithm"), [("prefill", "eagle3"), ("decode", "none"), ("decode", "eagle3")]
)
def test_a_node_holds_nothing_of_the_other_role(role: str, algorithm: str, tmp_path: Path) -> None:
    """Captured phases, static inputs and bytes of memory all belong to the node's own role (row A10)."""
    other = "decode" if role == "prefill" else "prefill"
    grown = {"decode": {"max_running": 64}, "prefill": {"chunk_tokens": 512, "max_batch": 64}}
    with built(role, tmp_path, algorithm) as held:
        assert held.of(*FOREIGN[other]), "parts of the node's own role are found"
        assert not held.of(*FOREIGN[role])
        runners = held.of(GraphRunner)
        assert all(runner.captured for runner in runners)
        assert {runner.spec.phase for runner in runners} <= PHASES[role]
        assert {slot.name for inputs in held.of(StaticInputs) for slot in inputs.slots} <= SLOTS[role]
        assert not [inputs for inputs in held.of(StaticInputs, StaticExtend) if inputs.poisoned]
        nbytes = held.nbytes
    poison = {"poison_graphs": True}
    with built(role, tmp_path, algorithm, process=poison, **{other: grown[other]}) as held:
        assert held.nbytes == nbytes, "no memory depends on the limits of the other role"
        assert all(inputs.poisoned for inputs in held.of(StaticInputs, StaticExtend))
    assert gc.get_freeze_count(), "what tests/conftest.py has exempted from the collector stays exempt"
