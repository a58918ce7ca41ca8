"""Which clusters use CUDA IPC, and which are refused before anything is loaded."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from common.checkpoint.model_config import ModelConfig
from common.config import load_cluster
from common.config.resolve_node import node_plan, pool_budget
from common.config.schema import (
    Cluster,
    DecodeNodeEntry,
    DecodeSection,
    Model,
    PrefillNodeEntry,
    PrefillSection,
    Transfer,
)
from common.config.transport_choice import choose_transport
from common.engine.forward.model_runner import load_model
from common.engine.host_memory import GIB
from common.engine.layers.placement import Placement
from common.engine.layers.ranks import OneRank
from common.engine.models.llava import load_llava
from common.engine.models.model_registry import build_model
from common.engine.sampling.logit_adjustments import adjustment_bytes
from common.errors import ConfigError
from common.kv_cache.pool_layout import PoolLayout
from common.kv_cache.shard import WHOLE, Shard
from common.node import device_memory, memory, serving_model
from common.node.encoder_memory import encoder_bytes
from common.node.memory import MemoryPlan, check_memory, check_share, plan_pool
from common.node.serving_device import serving_device
from common.node_plan import PoolBudget
from common.observability.logs import Log
from common.observability.startup import StartupReporter

CLUSTERS = Path(__file__).parents[3] / "deploy/clusters"
MODEL = (CLUSTERS / "../tiny_models/tiny-target").resolve()


def cluster(
    prefill: str,
    decode: str,
    transport: str = "auto",
    host: str = "127.0.0.1",
    tokens: int = 65_536,
) -> Cluster:
    return Cluster(
        model=Model(path=str(MODEL)),
        prefill=PrefillSection(nodes=(PrefillNodeEntry(name="p", device=prefill),), pool_tokens=32_768),
        decode=DecodeSection(
            nodes=(DecodeNodeEntry(name="d", device=decode, host=host),), pool_tokens=tokens
        ),
        transfer=Transfer(transport=transport),
    )


GPU_CLUSTERS = {
    "h200": (("cuda:0",), ("cuda:0",)),
    "h200-x2": (("cuda:0",), ("cuda:1",)),
    "h200-x2-tp": (("cuda:0", "cuda:1"), ("cuda:0", "cuda:1")),
    "h200-x4": (("cuda:0", "cuda:1"), ("cuda:2", "cuda:3")),
    "h200-x4-qwen3.5-35b-a3b": (("cuda:0", "cuda:1"), ("cuda:2", "cuda:3")),
}


@pytest.mark.parametrize("name", GPU_CLUSTERS)
def test_the_shipped_gpu_clusters(name: str) -> None:
    resolved = load_cluster(CLUSTERS / f"{name}.yaml", environ={})
    assert choose_transport(resolved.cluster).name == "cuda_ipc"
    prefill, decode = resolved.cluster.prefill.nodes[0], resolved.cluster.decode.nodes[0]
    assert (prefill.rank_devices, decode.rank_devices) == GPU_CLUSTERS[name]
    budgets = [
        (device, pool_budget(role, section, device))
        for role, section in (("prefill", resolved.cluster.prefill), ("decode", resolved.cluster.decode))
        for device in section.nodes[0].rank_devices
    ]
    page_bytes = 16 * 2 * 32 * 8 * 128 * 2  # an 8B Llama's in bf16
    for gpu in {device for device, _ in budgets}:
        shares = [budget for device, budget in budgets if device == gpu]
        assert all(budget.tokens is None for budget in shares)
        assert 0.8 < sum(budget.fraction for budget in shares) <= 0.95
        for budget in shares:
            plan = MemoryPlan(int(15.0 * GIB), 0, graphs=2 * GIB)
            assert plan_pool(139 * GIB, plan, budget, page_bytes) * 16 > 100_000


@pytest.mark.parametrize(
    ("prefill", "decode", "named", "expected"),
    [
        ("cuda:0", "cuda:1", "auto", "cuda_ipc"),
        ("cuda", "cuda", "auto", "cuda_ipc"),
        ("cuda:0", "cuda:0", "cuda_ipc", "cuda_ipc"),
        ("cpu", "cpu", "auto", "shm"),
        ("cpu", "cpu", "tcp", "tcp"),
    ],
)
def test_devices_choose_the_transport(prefill: str, decode: str, named: str, expected: str) -> None:
    assert choose_transport(cluster(prefill, decode, named)).name == expected


@pytest.mark.parametrize(
    ("refused", "says"),
    [
        (
            cluster("cuda:0", "cpu"),
            "p is on cuda:0 and d on cpu: pages cannot be sent between a GPU and a CPU",
        ),
        (cluster("cpu", "cuda:0"), "d is on cuda:0 and p on cpu"),
        (cluster("cuda:0", "cuda:0", "shm"), "shm moves pages in host memory"),
        (cluster("cuda:0", "cuda:0", "tcp"), "tcp moves pages in host memory"),
        (
            cluster("cuda:0", "cuda:0", host="10.0.0.1"),
            r"security\.isolated_network: pages are sent by nixl",
        ),
        (cluster("cpu", "cpu", "cuda_ipc"), "these nodes are on the CPU; write auto, shm, tcp or nixl"),
    ],
)
def test_what_cannot_work_is_refused(refused: Cluster, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        choose_transport(refused)
    with pytest.raises(ConfigError, match=says):
        load(refused)


def load(given: Cluster) -> serving_model.ServingModel:
    plan = node_plan(given, "decode", "d", MODEL)
    return serving_model.load_serving_model(plan, StartupReporter(None, Log("test")), Log("test"))


@pytest.mark.parametrize(
    ("device", "says"),
    [
        ("cuda:7", "this machine has 2 CUDA devices, cuda:0 to cuda:1"),
        ("cuda:x", "is not a device; write cpu, cuda or cuda:N"),
        ("meta", "is not supported; write cpu, cuda or cuda:N"),
        ("cuda:1", r"has compute capability 7\.5; the kernels need 8\.0 \(A100 and later\), or write cpu"),
    ],
)
def test_devices_that_cannot_be_used(monkeypatch: pytest.MonkeyPatch, device: str, says: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9 - 2 * index, 5 * index))
    with pytest.raises(ConfigError, match=says):
        serving_device(device)


def test_rocm_is_not_taken_for_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Row B3 (5): a ROCm build of PyTorch calls its devices cuda, and reports a capability above 8.0."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 4))
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    with pytest.raises(ConfigError, match=r"'cuda:0': this PyTorch is built for ROCm 7\.0; .* or write cpu"):
        load(cluster("cuda:0", "cuda:0"))


def test_no_cuda_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="'cuda:0': torch finds no CUDA device on this machine"):
        load(cluster("cuda:0", "cuda:0"))


def test_cuda_is_the_first_device(monkeypatch: pytest.MonkeyPatch) -> None:
    current: list[Any] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (8 + index, 0))
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    assert serving_device("cuda") == torch.device("cuda", 0)
    assert serving_device("cuda:1") == torch.device("cuda", 1)
    assert current == [0, 1]


def test_a_node_that_does_not_fit_is_refused_with_the_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "RELEASE_SECONDS", 0.0)
    gpu = torch.device("cuda", 0)
    plan = MemoryPlan(15 * GIB, 80 * GIB)
    per_token = 128 << 10
    free = {"now": 100 * GIB}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free["now"], 139 * GIB))
    check_memory(gpu, plan, 0, "decode.pool_tokens", per_token)
    check_memory(gpu, plan, 42 * GIB, "decode.pool_tokens", per_token)
    with pytest.raises(ConfigError) as caught:
        check_memory(gpu, plan, 43 * GIB, "decode.pool_tokens", per_token)
    assert str(caught.value) == (
        "decode.pool_tokens: does not fit on cuda:0 together with this cluster's other nodes: weights 15.00 GiB + "
        "KV pool 80.00 GiB + graphs not measured yet + room to work 2.00 GiB + sampling state 0.00 GiB = 97.00 GiB, "
        "the others 43.00 GiB, "
        "together more than its 139.00 GiB; with the other values unchanged there is room for 647168 tokens"
    )
    free["now"] = 60 * GIB
    with pytest.raises(ConfigError, match="60.00 GiB of 139.00 GiB are free; .* room for 352256 tokens"):
        check_memory(gpu, plan, 0, "decode.pool_tokens", per_token)
    free["now"] = 15 * GIB
    with pytest.raises(ConfigError, match="the node leaves no room for a pool"):
        check_memory(gpu, plan, 0, "decode.pool_tokens", per_token)
    with pytest.raises(
        ConfigError, match="15.00 GiB of 139.00 GiB are free, 15.00 GiB its own; .* 106496 tok"
    ):
        check_memory(gpu, plan, 0, "decode.pool_tokens", per_token, 15 * GIB)
    free["now"] = 82 * GIB
    check_memory(gpu, plan, 0, "decode.pool_tokens", per_token, 15 * GIB)


def test_memory_of_a_killed_predecessor_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    free = iter([10 * GIB, 10 * GIB, 30 * GIB])
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (next(free), 40 * GIB))
    check_memory(torch.device("cuda", 0), MemoryPlan(5 * GIB, 10 * GIB), 0, "decode.pool_tokens", 1024)
    assert slept == [0.25, 0.25]


def check_node(
    path: Path, given: Cluster, device: torch.device, budget: PoolBudget, shard: Shard = WHOLE
) -> None:
    """Check the memory as a node with 64 rows does before it loads weights, without a draft."""
    plan = node_plan(given, "decode", "d", path)
    plan = msgspec.structs.replace(plan, pool=budget, max_rows=64)
    device_memory.check_memory_before_loading(plan, device, shard)


def test_other_nodes_on_the_same_gpu_are_counted_before_they_start(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(device_memory, "check_memory", lambda *given: asked.append(given))
    given = cluster("cuda", "cuda:0")
    budget = PoolBudget(65_536, 0.9, "decode")
    check_node(MODEL, given, torch.device("cuda", 0), budget)
    check_node(MODEL, given, torch.device("cuda", 1), budget)
    (_, plan, beside, key, per_token), (_, alone, nobody, _, _) = asked
    assert (plan.pool, key) == ((65_536 + 16) * per_token, "decode.pool_tokens")
    assert plan.sampling == adjustment_bytes(64, 704) > 65 * 704 * 4
    assert beside == plan.weights + memory.WORKING_BYTES + plan.sampling + (32_768 + 16) * per_token
    assert plan.weights > 0
    assert alone == plan
    # No node of the file is on that GPU: only a test asks.
    assert nobody == -plan.total


@pytest.mark.parametrize("model", ["tiny-target", "tiny-moe", "tiny-hybrid"])
def test_a_rank_counts_its_share(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its weights, planes and windows; the KV heads of four ranks are on two of them each."""
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(device_memory, "check_memory", lambda *given: asked.append(given))
    path, budget, gpu = MODEL.parent / model, PoolBudget(64, 0.9, "decode"), torch.device("cuda", 1)
    for size in (1, 2, 4):
        check_node(path, cluster("cuda", "cuda:0"), gpu, budget, Shard(size - 1, size))
    config = ModelConfig.load(path)
    (_, one, _, _, per_token), *_ = asked
    for size, (_, plan, _, _, found) in zip((1, 2, 4), asked, strict=True):
        assert one.weights - plan.weights == weights_of(config, WHOLE) - weights_of(
            config, Shard(size - 1, size)
        )
        heads = min(size, config.num_kv_heads)
        assert (plan.pool, found) == (one.pool // heads, per_token // heads)
        assert plan.state <= one.state * 1.05 / size
    assert one.weights > 1.7 * asked[1][1].weights


def weights_of(config: ModelConfig, shard: Shard) -> int:
    """Return the bytes of a rank's weights in bfloat16."""
    nowhere = Placement(torch.bfloat16, torch.device("meta"), OneRank(shard))
    return sum(piece.into.nbytes for piece in build_model(config, nowhere).pieces())


def test_a_cache_of_images_is_counted_where_the_model_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(device_memory, "check_memory", lambda *given: asked.append(given))
    given = cluster("cuda", "cuda:0")
    gpu, budget = torch.device("cuda", 0), pool_budget("prefill", given.prefill, "cuda")
    for path in (MODEL, MODEL.parent / "tiny-vision"):
        check_node(path, given, gpu, replace(budget, tokens=64))
    (_, text, *_), (_, vision, *_) = asked
    assert (text.images, vision.images) == (0, given.prefill.image_cache_mib << 20)
    assert " + cache of images 0.25 GiB = " in str(vision)
    assert "image" not in str(text)
    beside = vision.working + vision.sampling + vision.images + vision.encoder
    assert vision.total == vision.weights + vision.pool + beside
    assert pool_budget("decode", given.decode, "cuda").image_bytes == 0


def test_the_vision_part_is_counted_only_on_prefill_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its weights and the memory of its forward are counted, also if another node on the GPU asks."""
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(device_memory, "check_memory", lambda *given: asked.append(given))
    given, path, gpu = cluster("cuda", "cuda:0"), MODEL.parent / "tiny-vision", torch.device("cuda", 0)
    config = ModelConfig.load(path)
    assert config.vision is not None
    for name, section in (("prefill", given.prefill), ("decode", given.decode)):
        check_node(path, given, gpu, pool_budget(name, section, "cuda"))
    (_, sees, beside, *_), (_, blind, beside_blind, *_) = asked
    part = load_llava(path, config, Placement(torch.bfloat16, torch.device("cpu")))
    tower, layer = [*part.parameters()], [*part.tower.encoder.layers[0].parameters()]
    language = [*load_model(path, "bfloat16", torch.device("cpu"))[0].parameters()]
    count = lambda parameters: 2 * sum({each.data_ptr(): each.numel() for each in parameters}.values())  # noqa: E731
    assert blind.weights == count(language)
    behind = sees.weights - count(language) - count(tower)  # in the file but not loaded: no feature needs it
    norm = 2 * 2 * part.tower.config.hidden_size
    assert behind == count(layer) + norm
    assert sees.encoder == encoder_bytes(config.vision, config.hidden_size, torch.bfloat16) > 0
    assert (blind.encoder, blind.images) == (0, 0)
    assert " + image encoder " in str(sees)
    assert "image" not in str(blind)
    assert (beside, beside_blind) == (blind.total, sees.total)


def test_what_a_share_leaves_is_the_pool() -> None:
    """KV memory is what remains after weights, graphs and working memory."""
    plan = MemoryPlan(15 * GIB, 0, graphs=3 * GIB, sampling=GIB)
    pages = plan_pool(139 * GIB, plan, PoolBudget(None, 0.5, "decode"), 2 << 20)
    assert pages == (69.5 - 15 - 3 - 1 - 2) * 512
    more = plan_pool(139 * GIB, plan, PoolBudget(None, 0.6, "decode"), 2 << 20)
    assert (more - pages) * (2 << 20) == pytest.approx(13.9 * GIB, abs=2 << 20)
    with pytest.raises(ConfigError) as caught:
        plan_pool(139 * GIB, plan, PoolBudget(None, 0.15, "decode"), 2 << 20)
    assert str(caught.value) == (
        "decode.memory_fraction: 0.15 of 139.00 GiB is 20.85 GiB, which leaves no room for KV: weights 15.00 GiB + "
        "KV pool 0.00 GiB + graphs 3.00 GiB + room to work 2.00 GiB + sampling state 1.00 GiB = 21.00 GiB; "
        "write at least 0.16"
    )
    with pytest.raises(ConfigError, match="use a larger GPU"):
        plan_pool(20 * GIB, plan, PoolBudget(None, 0.9, "decode"), 2 << 20)


def test_shares_of_one_gpu_are_held_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "RELEASE_SECONDS", 0.0)
    free = {"now": 100 * GIB}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free["now"], 100 * GIB))
    gpu, plan, budget = torch.device("cuda", 0), MemoryPlan(15 * GIB, 0), PoolBudget(None, 0.5, "prefill")
    check_share(gpu, plan, 50 * GIB, budget, 1 << 20)
    with pytest.raises(
        ConfigError, match="prefill.memory_fraction: 0.5 of cuda:0 is 50.00 GiB, and .* 51.00"
    ):
        check_share(gpu, plan, 51 * GIB, budget, 1 << 20)
    free["now"] = 40 * GIB
    with pytest.raises(ConfigError, match=r"only 40.00 GiB of 100.00 GiB are free; write at most 0.40"):
        check_share(gpu, plan, 50 * GIB, budget, 1 << 20)


def test_auto_is_a_number_on_a_cpu_and_a_share_on_a_gpu() -> None:
    section = DecodeSection()
    assert pool_budget("decode", section, "cpu") == PoolBudget(65_536, 0.9, "decode")
    assert pool_budget("decode", section, "cuda:1") == PoolBudget(None, 0.9, "decode")
    assert pool_budget("prefill", PrefillSection(image_cache_mib=3), "cpu") == PoolBudget(
        32_768, 0.9, "prefill", runs_vision=True, image_bytes=3 << 20
    )
    assert pool_budget("decode", DecodeSection(pool_tokens=99), "cuda") == PoolBudget(99, 0.9, "decode")


def test_the_pool_follows_the_trial_of_the_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model loaded with a trial pool gets the remaining pages, and requests as long as they allow."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (4 * GIB, 4 * GIB))
    served = load(cluster("cpu", "cpu"))
    assert (served.num_pages - 1) * served.page_size == 65_536
    assert served.spec.page_bytes == kv_bytes(served)
    trial = replace(
        served,
        memory=serving_model.NodeMemory(PoolBudget(None, 0.9, "decode"), MemoryPlan(GIB, 0)),
        num_pages=2,
        max_model_len=10**9,
    )
    small, large = trial.with_pool(GIB // 4), trial.with_pool(0)
    assert (large.num_pages - small.num_pages) * served.spec.page_bytes == pytest.approx(
        GIB // 4, abs=served.spec.page_bytes
    )
    assert small.max_model_len == (small.num_pages - 1) * served.page_size


def test_a_pool_of_so_many_tokens_is_checked_with_its_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """What passed before loading is refused with the calculation once the graphs are measured."""
    monkeypatch.setattr(memory, "RELEASE_SECONDS", 0.0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (4 * GIB, 6 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: GIB)
    own = serving_model.NodeMemory(PoolBudget(6400, 0.9, "decode"), MemoryPlan(GIB, 0))
    trial = replace(load(cluster("cpu", "cpu")), memory=own, num_pages=2, max_model_len=10**9)
    fits = trial.with_pool(GIB)
    assert (fits.num_pages, fits.max_model_len, fits.memory.plan.graphs) == (401, 6400, GIB)
    pool = fits.num_pages * fits.spec.page_bytes
    with pytest.raises(ConfigError) as caught:
        trial.with_pool(2 * GIB)
    plan = str(replace(own.plan, pool=pool, graphs=2 * GIB))
    assert "+ graphs 2.00 GiB +" in plan
    assert str(caught.value) == (
        f"decode.pool_tokens: does not fit on cpu: {plan}, 4.00 GiB of 6.00 GiB are free, 1.00 GiB its own; "
        "the node leaves no room for a pool: use a larger GPU, or one GPU per node"
    )
    with pytest.raises(
        ConfigError, match="together with this cluster's other nodes: .* graphs 1.00 GiB .* 2.50"
    ):
        replace(trial, memory=replace(own, beside=int(2.5 * GIB))).with_pool(GIB)


def kv_bytes(served: serving_model.ServingModel) -> int:
    """Return the bytes of one page, by the layout that is allocated."""
    layouts = [
        PoolLayout(fingerprint="f", spec=served.spec, num_pages=pages).total_bytes for pages in (64, 128)
    ]
    return (layouts[1] - layouts[0]) // 64
