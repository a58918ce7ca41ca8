"""The cluster file that `deploy/up MODEL_DIR` writes: devices and memory of the nodes."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from common.config import Resolved, load_cluster
from common.config.schema import Cluster
from common.config.transport_choice import choose_transport
from common.errors import ConfigError
from deploy.gpus import Gpu
from deploy.own_model import GIB, Machine, cluster_sections, write_cluster_file
from tests.architecture.source_tree import ROOT
from tests.fakes.mtp_models import first_modules

MODELS = ROOT / "deploy" / "tiny_models"
MODEL = MODELS / "tiny-target"
CPU = Machine((), 8, 64 * GIB, 32 * GIB)
H200 = Gpu("NVIDIA H200", 140 * GIB)
SMALL = Gpu("NVIDIA L4", 22 * GIB)


def resolved(tmp_path: Path, machine: Machine, draft: Path | None = None, model: Path = MODEL) -> Resolved:
    file = tmp_path / "clusters" / "m.yaml"
    write_cluster_file(file, "m", cluster_sections("acme/m", model, draft, machine))
    return load_cluster(file, environ={})


def devices(cluster: Cluster) -> list[str]:
    return [node.device for node in cluster.prefill.nodes] + [node.device for node in cluster.decode.nodes]


def test_without_a_gpu_both_nodes_share_the_cpu(tmp_path: Path) -> None:
    cluster = resolved(tmp_path, CPU).cluster
    assert devices(cluster) == ["cpu", "cpu"]
    assert cluster.process.threads == 4
    assert (cluster.prefill.pool_tokens, cluster.decode.pool_tokens) == ("auto", "auto")
    assert choose_transport(cluster).name == "shm"
    assert cluster.model.served_name == "acme/m"


def test_on_one_gpu_both_nodes_share_it(tmp_path: Path) -> None:
    cluster = resolved(tmp_path, replace(CPU, gpus=(H200,))).cluster
    assert devices(cluster) == ["cuda:0", "cuda:0"]
    assert cluster.prefill.memory_fraction + cluster.decode.memory_fraction == pytest.approx(0.93)
    assert cluster.prefill.memory_fraction < cluster.decode.memory_fraction
    assert cluster.prefill.chunk_tokens == 8192
    assert choose_transport(cluster).name == "cuda_ipc"


@pytest.mark.parametrize("weights", [0.1, 0.4, 0.6])
def test_each_share_of_a_gpu_holds_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: float
) -> None:
    """This holds as long as two copies fit; with larger weights the nodes refuse to start and show the calculation."""
    monkeypatch.setattr("deploy.own_model.stored_bytes", lambda directory: int(weights * SMALL.total_bytes))
    cluster = resolved(tmp_path, replace(CPU, gpus=(SMALL,))).cluster
    for share in (cluster.prefill.memory_fraction, cluster.decode.memory_fraction):
        assert share > min(weights, 0.46)
    assert cluster.prefill.chunk_tokens == 2048


def test_on_several_gpus_each_node_has_its_own(tmp_path: Path) -> None:
    cluster = resolved(tmp_path, replace(CPU, gpus=(H200, H200, H200))).cluster
    assert devices(cluster) == ["cuda:0", "cuda:1"]
    assert cluster.prefill.memory_fraction == cluster.decode.memory_fraction == 0.9


def test_pools_of_the_cpu_fit_into_its_memory(tmp_path: Path) -> None:
    """The default pools of a model with 28 layers would take 22 GiB."""
    model = tmp_path / "wide"
    shutil.copytree(MODEL, model)
    config = json.loads((model / "config.json").read_text())
    config |= {"num_hidden_layers": 28, "num_key_value_heads": 4, "num_attention_heads": 4, "head_dim": 256}
    (model / "config.json").write_text(json.dumps(config))
    per_token = 2 * 28 * 4 * 256 * 4
    machine = replace(CPU, free_memory=8 * GIB, free_shared=2 * GIB)
    cluster = resolved(tmp_path, machine, model=model).cluster
    prefill, decode = cluster.prefill.pool_tokens, cluster.decode.pool_tokens
    assert isinstance(prefill, int)
    assert isinstance(decode, int)
    assert prefill * per_token < 0.2 * 8 * GIB
    assert decode * per_token < 0.8 * 2 * GIB
    assert prefill % 1024 == decode % 1024 == 0
    assert min(prefill, decode) >= 1024


@pytest.mark.parametrize(
    ("draft", "algorithm", "steps"),
    [("eagle3", "eagle3", 3), ("eagle", "eagle", 3), ("mtp", "mtp", 3), ("standalone", "standalone", 3)],
)
def test_the_algorithm_follows_from_the_draft(tmp_path: Path, draft: str, algorithm: str, steps: int) -> None:
    speculation = resolved(tmp_path, CPU, MODELS / f"tiny-{draft}").cluster.speculation
    assert (speculation.algorithm, speculation.steps) == (algorithm, steps)
    assert speculation.draft_model_path == str(MODELS / f"tiny-{draft}")


@pytest.mark.parametrize(("modules", "steps"), [(2, 2), (1, 3)])
def test_several_mtp_modules_take_one_step_each(modules: int, steps: int, tmp_path: Path) -> None:
    draft = first_modules(tmp_path / "draft", modules)
    assert resolved(tmp_path, CPU, draft).cluster.speculation.steps == steps


def broken(tmp_path: Path, **changes: Any) -> Path:
    model = tmp_path / "broken"
    shutil.copytree(MODEL, model)
    config = json.loads((model / "config.json").read_text()) | changes
    (model / "config.json").write_text(json.dumps(config))
    return model


def test_what_is_not_served_is_refused_before_anything_starts(tmp_path: Path) -> None:
    model = broken(tmp_path, architectures=["MambaForCausalLM"])
    with pytest.raises(ConfigError, match="architecture MambaForCausalLM is not supported"):
        cluster_sections("m", model, None, CPU)
    with pytest.raises(ConfigError, match="MambaForCausalLM is not a draft"):
        cluster_sections("m", MODEL, model, CPU)


@pytest.mark.parametrize("draft", ["eagle", "eagle3", "mtp", "standalone"])
def test_a_draft_of_another_model_is_refused_before_anything_starts(draft: str) -> None:
    with pytest.raises(ConfigError, match="vocab_size.*; use a draft made for the target, or none"):
        cluster_sections("m", MODELS / "tiny-tools", MODELS / f"tiny-{draft}", CPU)


def test_a_model_without_weights_is_refused(tmp_path: Path) -> None:
    model = broken(tmp_path)
    (model / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="found no weights"):
        cluster_sections("m", model, None, CPU)


def test_the_file_explains_itself_and_replaces_an_earlier_one(tmp_path: Path) -> None:
    file = tmp_path / "clusters" / "m.yaml"
    for name in ("first", "second"):
        write_cluster_file(file, name, {"model": {"path": "/m", "served_name": name}})
    assert file.read_text().startswith("# Written by deploy/up for second")
    assert yaml.safe_load(file.read_text())["model"]["served_name"] == "second"
    assert [path.name for path in file.parent.iterdir()] == ["m.yaml"]


def test_a_directory_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    (tmp_path / "clusters").write_text("a file")
    with pytest.raises(ConfigError, match=f"cannot write {tmp_path}/clusters/m.yaml"):
        write_cluster_file(tmp_path / "clusters" / "m.yaml", "m", {})


def test_a_file_that_cannot_be_replaced_leaves_no_other_one(tmp_path: Path) -> None:
    (tmp_path / "m.yaml").mkdir()
    with pytest.raises(ConfigError, match="Is a directory"):
        write_cluster_file(tmp_path / "m.yaml", "m", {})
    assert [path.name for path in tmp_path.iterdir()] == ["m.yaml"]


def test_this_machine_is_measured() -> None:
    machine = Machine.of_this_host([])
    assert machine.cores >= 1
    assert machine.free_memory > 0
    assert "the CPU" in str(machine)
    assert "shared by both nodes" in str(replace(machine, gpus=(H200,)))
    assert "one for each node" in str(replace(machine, gpus=(H200, H200)))
