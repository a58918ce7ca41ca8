"""Which clusters get CUDA IPC, and which are refused before anything is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from common.config import load_cluster
from common.config.schema import (
    Cluster,
    DecodeNode,
    DecodeSection,
    Model,
    PrefillNode,
    PrefillSection,
    Transfer,
    TransportName,
)
from common.config.transport_choice import choose_transport
from common.engine import memory, serving_model
from common.engine.logit_adjustments import adjustment_bytes
from common.engine.memory import GIB, MemoryPlan, check_memory
from common.errors import ConfigError
from common.observability.logs import Log
from common.observability.startup import StartupReporter

CLUSTERS = Path(__file__).parents[3] / "deploy/clusters"
MODEL = (CLUSTERS / "../models/tiny-target").resolve()


def cluster(
    prefill: str,
    decode: str,
    transport: TransportName = "auto",
    host: str = "127.0.0.1",
    tokens: int = 65_536,
) -> Cluster:
    return Cluster(
        model=Model(path=str(MODEL)),
        prefill=PrefillSection(nodes=(PrefillNode(name="p", device=prefill),)),
        decode=DecodeSection(nodes=(DecodeNode(name="d", device=decode, host=host),), pool_tokens=tokens),
        transfer=Transfer(transport=transport),
    )


@pytest.mark.parametrize("name", ["h200", "h200-x2"])
def test_the_shipped_gpu_clusters(name: str) -> None:
    resolved = load_cluster(CLUSTERS / f"{name}.yaml", environ={})
    assert resolved.model_path == MODEL
    assert choose_transport(resolved.cluster) == "cuda_ipc"
    devices = resolved.cluster.prefill.nodes[0].device, resolved.cluster.decode.nodes[0].device
    assert devices == (("cuda:0", "cuda:1") if name == "h200-x2" else ("cuda:0", "cuda:0"))
    per_token = 2 * 32 * 8 * 128 * 2
    pools = [
        (resolved.cluster.prefill.nodes[0].device, resolved.cluster.prefill.pool_tokens * per_token),
        (resolved.cluster.decode.nodes[0].device, resolved.cluster.decode.pool_tokens * per_token),
    ]
    for gpu in {device for device, _ in pools}:
        plans = [MemoryPlan(int(15.0 * GIB), pool) for device, pool in pools if device == gpu]
        assert 0.75 * 139 * GIB < sum(plan.total for plan in plans) < 0.97 * 139 * GIB


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
def test_devices_choose_the_transport(prefill: str, decode: str, named: TransportName, expected: str) -> None:
    assert choose_transport(cluster(prefill, decode, named)) == expected


@pytest.mark.parametrize(
    ("refused", "says"),
    [
        (cluster("cuda:0", "cpu"), "p is on cuda:0 and d on cpu: pages do not move between a GPU and a CPU"),
        (cluster("cpu", "cuda:0"), "d is on cuda:0 and p on cpu"),
        (cluster("cuda:0", "cuda:0", "shm"), "shm moves pages that lie in host memory"),
        (cluster("cuda:0", "cuda:0", "tcp"), "tcp moves pages that lie in host memory"),
        (cluster("cuda:0", "cuda:0", host="10.0.0.1"), "cuda_ipc, between nodes of one host"),
        (cluster("cpu", "cpu", "cuda_ipc"), "these nodes are on the CPU; write auto, shm or tcp"),
    ],
)
def test_what_cannot_work_is_refused(refused: Cluster, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        choose_transport(refused)
    with pytest.raises(ConfigError, match=says):
        load(refused)


def load(given: Cluster, device: str = "cpu") -> serving_model.ServingModel:
    return serving_model.load_serving_model(
        MODEL,
        given,
        device,
        given.decode.pool_tokens,
        "decode.pool_tokens",
        given.decode.max_running,
        StartupReporter(None, Log("test")),
    )


@pytest.mark.parametrize(
    ("device", "says"),
    [
        ("cuda:7", "this machine has 2 CUDA devices, cuda:0 to cuda:1"),
        ("cuda:x", "is not a device; write cpu, cuda or cuda:N"),
        ("meta", "is not supported; write cpu, cuda or cuda:N"),
    ],
)
def test_devices_that_are_not_there(monkeypatch: pytest.MonkeyPatch, device: str, says: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match=says):
        serving_model._device(device)


def test_no_cuda_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="'cuda:0': torch finds no CUDA device on this machine"):
        load(cluster("cuda:0", "cuda:0"), "cuda:0")


def test_cuda_is_the_first_device(monkeypatch: pytest.MonkeyPatch) -> None:
    current = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    assert serving_model._device("cuda") == torch.device("cuda", 0)
    assert serving_model._device("cuda:1") == torch.device("cuda", 1)
    assert current == [0, 1]


def test_a_node_that_does_not_fit_is_refused_with_the_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "PATIENCE", 0.0)
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
        "decode.pool_tokens: does not fit on cuda:0 beside this cluster's other nodes there: weights 15.00 GiB + "
        "KV pool 80.00 GiB + room to work 2.00 GiB + sampling state 0.00 GiB = 97.00 GiB, the others 43.00 GiB, "
        "together more than its 139.00 GiB; with all else equal there is room for 647168 tokens"
    )
    free["now"] = 60 * GIB
    with pytest.raises(ConfigError, match="60.00 GiB of 139.00 GiB are free; .* room for 352256 tokens"):
        check_memory(gpu, plan, 0, "decode.pool_tokens", per_token)
    free["now"] = 15 * GIB
    with pytest.raises(ConfigError, match="the weights alone leave no room"):
        check_memory(gpu, plan, 0, "decode.pool_tokens", per_token)


def test_memory_of_a_killed_predecessor_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    free = iter([10 * GIB, 10 * GIB, 30 * GIB])
    slept: list[float] = []
    monkeypatch.setattr(memory.time, "sleep", slept.append)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (next(free), 40 * GIB))
    check_memory(torch.device("cuda", 0), MemoryPlan(5 * GIB, 10 * GIB), 0, "decode.pool_tokens", 1024)
    assert slept == [0.25, 0.25]


def test_other_nodes_on_the_same_gpu_are_counted_before_they_start(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(serving_model, "check_memory", lambda *given: asked.append(given))
    given = cluster("cuda", "cuda:0")
    serving_model._check_memory(MODEL, given, torch.device("cuda", 0), 65_536, "decode.pool_tokens", 64)
    serving_model._check_memory(MODEL, given, torch.device("cuda", 1), 65_536, "decode.pool_tokens", 64)
    (_, plan, beside, key, per_token), (_, alone, nobody, _, _) = asked
    assert (plan.pool, key) == ((65_536 + 16) * per_token, "decode.pool_tokens")
    assert plan.sampling == adjustment_bytes(64, 704) > 65 * 704 * 4
    assert beside == plan.weights + memory.WORKING_BYTES + plan.sampling + (32_768 + 16) * per_token
    assert plan.weights > 0
    assert alone == plan
    assert nobody == -plan.total  # no node of the file is there: not asked in earnest
