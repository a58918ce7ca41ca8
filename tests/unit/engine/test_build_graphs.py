"""What `build` composes for each speculative algorithm, as the logged table of graphs shows."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import save_file

import decode_node.build
import prefill_node.build
from common.checkpoint.model_config import ModelConfig
from common.config import load_cluster
from common.engine.forward.model_runner import load_model
from common.engine.graphs import node_graphs
from common.engine.layers.placement import Placement
from common.engine.models.eagle import EMBEDDING, Eagle3Head
from common.node import graph_start
from common.node.serving_model import ServingModel
from common.observability.logs import Log
from common.observability.startup import StartupReporter
from common.speculation.directory import load_draft_config
from tests.fakes.mtp_models import first_modules

MODELS = Path(__file__).parents[3] / "deploy" / "tiny_models"
TARGET = MODELS / "tiny-target"
DRAFTS = {
    "ngram": "",
    "eagle": "tiny-eagle",
    "eagle3": "tiny-eagle3",
    "mtp": "tiny-mtp",
    "standalone": "tiny-standalone",
}
ROUND = [("verify", "target"), ("draft", "draft"), ("draft_extend", "draft")]
FORCED = [("verify", "target"), ("draft_extend", "draft")]  # a step that verifies a chain of forced tokens
# (phase, model) of every captured forward
CAPTURED: dict[str, dict[str, list[tuple[str, str]]]] = {
    "prefill": {
        "none": [("prefill", "target")],
        "ngram": [("prefill", "target")],
        "eagle": [("prefill", "target"), ("prefill", "draft")],
        "eagle3": [("prefill", "target"), ("prefill", "draft")],
        "mtp": [("prefill", "target"), ("prefill", "draft-0"), ("prefill", "draft-1")],
        "standalone": [("prefill", "target"), ("prefill", "draft")],
    },
    "decode": {
        # verify: of tokens that grammars force
        "none": [("decode", "target"), ("verify", "target")],
        "ngram": [("verify", "target")],
        "eagle": ROUND + FORCED,
        "eagle3": ROUND + FORCED,
        "mtp": [("verify", "target"), ("draft_extend", "draft"), *FORCED],
        "standalone": ROUND[:2] + FORCED,
    },
}


def built(
    role: str,
    tmp_path: Path,
    log: Log,
    algorithm: str,
    draft: Path | None = None,
    graphs: str = "breakable",
) -> prefill_node.build.BuiltPrefillNode | decode_node.build.BuiltDecodeNode:
    config: dict[str, Any] = {
        "model": {"path": str(TARGET), "max_model_len": 64},
        "prefill": {"graphs": graphs, "pool_tokens": 256, "chunk_tokens": 4, "max_batch": 2},
        "decode": {"graphs": "full", "pool_tokens": 256, "max_running": 1, "max_transferring": 2},
        "process": {"run_dir": str(tmp_path / "run")},
    }
    if algorithm != "none":
        config["speculation"] = {"algorithm": algorithm, "steps": 2}
    path = draft or (MODELS / DRAFTS[algorithm] if DRAFTS.get(algorithm) else None)
    if path is not None:
        config["speculation"]["draft_model_path"] = str(path)
    file = tmp_path / "cluster.yaml"
    file.write_text(yaml.safe_dump(config))
    build: Any = {"prefill": prefill_node.build.build, "decode": decode_node.build.build}[role]
    return build(load_cluster(file, (), {}), f"{role}-0", StartupReporter(None, log), log)


def table(caplog: pytest.LogCaptureFixture) -> list[list[str]]:
    """Return the rows of the node's table of graphs."""
    lines = [record.fields["table"] for record in caplog.records if record.message == "graphs"]  # type: ignore[attr-defined]
    return [line.split() for line in lines[1:]]


@pytest.mark.parametrize("algorithm", CAPTURED["prefill"])
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_every_algorithm_has_the_graphs_of_its_role(
    role: str,
    algorithm: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows B1, B7: no algorithm switches off prompt graphs of the target or of its draft.

    Row B8: the trial that sizes a GPU's pool includes every forward that is captured later.
    """
    tried: list[tuple[str, str]] = []

    def sized(
        served: ServingModel, build: Callable[[], Iterable[node_graphs.NodeGraphs[Any]]]
    ) -> ServingModel:
        """Replaces the trial, which on a GPU builds what it measures; here only its forwards are examined."""
        tried.extend((report.phase, report.model) for report in map(node_graphs.report, build()))
        return served

    monkeypatch.setattr(graph_start, "sized", sized)
    backend = {"prefill": "breakable", "decode": "full"}[role]
    with caplog.at_level("INFO", "tandem.graphs"), closing(built(role, tmp_path, Log("graphs"), algorithm)):
        rows = table(caplog)
    assert sorted((phase, model) for phase, model, *_ in rows) == sorted(CAPTURED[role][algorithm])
    assert {row[2] for row in rows} == {backend}, rows
    assert sorted(tried) == sorted(CAPTURED[role][algorithm])


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_one_mtp_module_has_the_graphs_of_a_head(
    role: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    draft = first_modules(tmp_path / "one", 1)
    with caplog.at_level("INFO", "tandem.graphs"):
        with closing(built(role, tmp_path, Log("graphs"), "mtp", draft)):
            rows = table(caplog)
    assert sorted((phase, model) for phase, model, *_ in rows) == sorted(CAPTURED[role]["eagle"])


def test_prompt_graphs_that_are_switched_off_are_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The log says at INFO which switch caused it, for the target and for the draft (row A8)."""
    with caplog.at_level("INFO", "tandem.graphs"):
        with closing(built("prefill", tmp_path, Log("graphs"), "eagle3", graphs="none")):
            lines = [record for record in caplog.records if record.message == "graphs"]
    assert {record.levelname for record in lines} == {"INFO"}
    told = [record.fields["table"] for record in lines[1:]]  # type: ignore[attr-defined]
    assert [line.split()[:2] for line in told] == [["prefill", "target"], ["prefill", "draft"]]
    assert all(line.endswith("prefill.graphs is none") for line in told), told


def narrow_head(folder: Path) -> Path:
    """Write an EAGLE-3 head that is half as wide as the target and reads two of its layers."""
    path = folder / "narrow"
    shutil.copytree(MODELS / "tiny-eagle3", path)
    changes = {
        "hidden_size": 128,
        "num_attention_heads": 4,
        "head_dim": 32,
        "draft_vocab_size": None,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 5]},
    }
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **changes}))
    read = load_draft_config(path, "eagle3", ModelConfig.load(TARGET))
    head = Eagle3Head(
        read,
        load_model(TARGET)[0],
        Placement(torch.float32, torch.device("cpu")),
        (EMBEDDING, "lm_head.weight"),
    )
    tensors = {piece.name: torch.randn(piece.whole) * 0.1 for piece in head.pieces()}
    save_file(tensors, path / "model.safetensors")
    return path


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_head_of_other_widths_is_captured(
    role: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Rows D2, D7: the nodes take widths from the config, not from the shipped heads (3 x 256 and 256)."""
    draft = narrow_head(tmp_path)
    with (
        caplog.at_level("INFO", "tandem.graphs"),
        closing(built(role, tmp_path, Log("graphs"), "eagle3", draft)),
    ):
        rows = table(caplog)
    assert sorted((phase, model) for phase, model, *_ in rows) == sorted(CAPTURED[role]["eagle3"])
    assert not [row for row in rows if "eager:" in row], rows
