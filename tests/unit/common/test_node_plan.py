"""The plan of a node: everything it is built from, as values that could be sent to another process."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest

from common.checkpoint.model_config import model_fingerprint
from common.config import load_cluster
from common.config.resolve_node import node_plan
from common.config.schema import (
    Cluster,
    DecodeNodeEntry,
    DecodeSection,
    Kv,
    Model,
    PrefillNodeEntry,
    PrefillSection,
    Speculation,
    Transfer,
)
from common.config.section_process import Process
from common.config.transport_choice import choose_layers, choose_transport
from common.errors import ConfigError
from common.kv_cache.plane import Kept
from common.node_plan import NodePlan

MODELS = Path(__file__).parents[3] / "deploy" / "tiny_models"
CLUSTERS = sorted((Path(__file__).parents[3] / "deploy" / "clusters").glob("*.yaml"))


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_name_that_the_file_does_not_have_is_refused(role: str) -> None:
    cluster = Cluster(model=Model(path=str(MODELS / "tiny-target")))
    with pytest.raises(
        ConfigError, match=rf"{role}\.nodes: no node is called 'other-7'; the file has: {role}-0"
    ):
        node_plan(cluster, role, "other-7", MODELS / "tiny-target")


@pytest.mark.parametrize(
    ("speculation", "tokens"),
    [
        ({}, 1),
        ({"algorithm": "ngram", "steps": 4}, 5),
        ({"algorithm": "mtp", "steps": 3}, 8),
        ({"algorithm": "mtp", "steps": 3, "forced_tokens": False}, 4),
        ({"algorithm": "mtp", "steps": 9}, 10),
    ],
)
def test_the_window_of_a_state_holds_the_widest_step(speculation: dict[str, Any], tokens: int) -> None:
    """Steps of a draft model may verify more tokens that a grammar forces than a round has drafts."""
    hybrid = CLUSTERS[0].parents[1] / "tiny_models" / "tiny-hybrid"
    cluster = Cluster(model=Model(path=str(hybrid)), speculation=Speculation(**speculation))
    draft = hybrid if cluster.speculation.algorithm == "mtp" else None
    assert node_plan(cluster, "decode", "decode-0", hybrid, draft).round_tokens == tokens


def test_fp8_keys_and_values_take_half_the_bytes_and_leave_states_as_they_are() -> None:
    hybrid = CLUSTERS[0].parents[1] / "tiny_models" / "tiny-hybrid"
    wide, narrow = (
        node_plan(Cluster(model=Model(path=str(hybrid)), kv=Kv(dtype=dtype)), "prefill", "prefill-0", hybrid)
        for dtype in ("auto", "fp8")
    )
    assert wide.spec.token_bytes == 4 * narrow.spec.token_bytes
    assert wide.spec.state_bytes == narrow.spec.state_bytes > 0
    assert {plane.dtype for plane in narrow.spec.planes if plane.name in "kv"} == {"float8_e4m3fn"}


@pytest.mark.parametrize(
    ("model", "ranks", "words"),
    [
        ("tiny-target", 2, "the model has no experts that the ranks could divide; leave it out"),
        ("few", 8, "4 experts are too few for 8 ranks; leave it out, or write fewer ranks"),
        ("tiny-moe", 2, ""),
    ],
)
def test_experts_of_ranks(model: str, ranks: Literal[2, 8], words: str, tmp_path: Path) -> None:
    models = CLUSTERS[0].parents[1] / "tiny_models"
    path = models / model
    if model == "few":
        shutil.copytree(models / "tiny-moe", path := tmp_path / "few")
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**config, "num_experts": 4}))
    nodes = (DecodeNodeEntry(name="decode-0", tensor_parallel=ranks, expert_parallel=True),)
    cluster = Cluster(model=Model(path=str(path)), decode=DecodeSection(nodes=nodes))
    if not words:
        plan = node_plan(cluster, "decode", "decode-0", path)
        assert plan.expert_parallel
        assert [share.expert_parallel for share in plan.shares] == [False, True, True]
        return
    with pytest.raises(ConfigError, match=words) as caught:
        node_plan(cluster, "decode", "decode-0", path)
    assert caught.value.path == "decode.nodes[decode-0].expert_parallel"


@pytest.mark.parametrize(
    ("prefill", "decode", "address", "beside"),
    [
        ("tcp://10.0.0.7:5601", "10.0.0.8", None, 1),
        ("tcp://10.0.0.7:5601", "10.0.0.7", None, 2),
        ("tcp://host-a:5601", "host-b", None, 1),
        ("tcp://host-a:5601", "host-a.example.org", None, 2),
        ("tcp://[fd00::7]:5601", "fd00:0::7", None, 2),
        ("tcp://[fd00::7]:5601", "fd00::8", None, 1),
        # one host may have each of these pairs
        ("tcp://[fd00::7]:5601", "10.0.0.8", None, 2),
        ("tcp://host-a:5601", "10.0.0.8", None, 2),
        ("tcp://10.0.0.7:5601", "127.0.0.1", None, 2),
        ("tcp://10.0.0.7:5601", "0.0.0.0", None, 2),
        ("tcp://host-a:5601", "localhost", None, 2),
        ("ipc:///run/peer.sock", "10.0.0.8", None, 2),
        ("auto", "10.0.0.8", None, 2),
        # only the node's own `own` has an address that is known here
        ("tcp://own:5601", "10.0.0.8", None, 2),
        ("tcp://own:5601", "10.0.0.8", "10.0.0.7", 1),
        ("tcp://own:5601", "10.0.0.7", "10.0.0.7", 2),
        ("tcp://10.0.0.8:5601", "own", "10.0.0.7", 2),
        ("tcp://own:5601", "own", "10.0.0.7", 2),
    ],
)
def test_only_a_node_that_is_certainly_elsewhere_is_not_counted_on_the_gpus(
    prefill: str, decode: str, address: str | None, beside: int
) -> None:
    """Both are on cuda:0, which is one GPU unless their hosts differ."""
    cluster = Cluster(
        model=Model(path=str(MODELS / "tiny-target")),
        process=Process(address=address),
        transfer=Transfer(transport="cuda_ipc"),
        prefill=PrefillSection(
            nodes=(PrefillNodeEntry(name="prefill-0", device="cuda:0", peer_address=prefill),)
        ),
        decode=DecodeSection(nodes=(DecodeNodeEntry(name="decode-0", device="cuda:0", host=decode),)),
    )
    plan = node_plan(cluster, "prefill", "prefill-0", MODELS / "tiny-target")
    assert len(plan.shares) == beside


@pytest.mark.parametrize("file", CLUSTERS, ids=lambda file: file.stem)
def test_every_node_of_the_shipped_clusters_has_a_plan_that_can_be_sent(file: Path) -> None:
    resolved = load_cluster(file, environ={})
    cluster, nodes = resolved.cluster, 0
    for role, section, rows in (
        ("prefill", cluster.prefill, cluster.prefill.max_batch),
        ("decode", cluster.decode, cluster.decode.max_running),
    ):
        for node in section.nodes:
            plan = node_plan(
                cluster, role, node.name, resolved.model_path, resolved.draft_path, ["ipc:///run/router.sock"]
            )
            assert msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=NodePlan) == plan
            assert (plan.role, plan.name, plan.device, plan.max_rows) == (
                role,
                node.name,
                node.rank_devices[0],
                rows,
            )
            assert (plan.pool.section, plan.pool.runs_vision) == (role, role == "prefill")
            assert (plan.model.path, plan.page_size) == (str(resolved.model_path), cluster.kv.page_size)
            assert plan.model.weights_id == model_fingerprint(
                resolved.model_path, None, cluster.model.quantization
            )
            assert plan.model.dtype == ("float32" if not node.on_gpu else cluster.model.dtype)
            owners = {plane.owner for plane in plan.spec.planes}
            assert owners == ({"target"} if resolved.draft_path is None else {"target", "draft"})
            pages = {plane.dtype for plane in plan.spec.planes if plane.kept is Kept.PAGED}
            assert pages == {plan.model.dtype}
            assert plan.speculation.algorithm == cluster.speculation.algorithm
            assert (plan.speculation.draft_path is None) == (resolved.draft_path is None)
            assert plan.transfer.transport == choose_transport(cluster).name
            assert plan.transfer.layers == choose_layers(cluster)
            assert plan.router.addresses == ("ipc:///run/router.sock",)
            nodes += 1
            every = (*cluster.prefill.nodes, *cluster.decode.nodes)
            assert len(plan.shares) == sum(len(each.rank_devices) for each in every)
            assert plan.devices == node.rank_devices
            last = plan.of_rank(len(plan.devices) - 1)
            assert last.device == node.rank_devices[-1]
            assert last.pool.runs_vision == (role == "prefill" and len(plan.devices) == 1)
    assert nodes
