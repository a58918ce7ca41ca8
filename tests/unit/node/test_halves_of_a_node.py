"""The halves of a movable node: one copy of the weights, and memory of a GPU that is counted once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from common.config.movable_schema import MovableNodeEntry, MovableSection
from common.config.resolve_node import node_plan
from common.config.schema import (
    Cluster,
    DecodeNodeEntry,
    DecodeSection,
    Model,
    PrefillNodeEntry,
    PrefillSection,
    Speculation,
)
from common.engine.host_memory import GIB
from common.errors import ConfigError
from common.kv_cache.shard import WHOLE
from common.node import device_memory, memory, serving_model
from common.node.memory import MemoryPlan
from common.node.ranks.sole_rank import SoleRank
from common.node.shared_parts import ALONE, check_process
from common.node_plan import NodePlan, PoolBudget
from common.observability.logs import Log
from common.observability.startup import StartupReporter

MODELS = Path(__file__).parents[3] / "deploy" / "tiny_models"


def halves(device: str) -> list[NodePlan]:
    """Return the plans of both halves of a node with a draft model."""
    name, draft = "flex-0", MODELS / "tiny-eagle3"
    cluster = Cluster(
        model=Model(path=str(MODELS / "tiny-target")),
        prefill=PrefillSection(nodes=(PrefillNodeEntry(name=name, device=device),)),
        decode=DecodeSection(nodes=(DecodeNodeEntry(name=name, device=device),)),
        movable=MovableSection(
            nodes=(MovableNodeEntry(name=name),), prefill_pool_tokens=512, decode_pool_tokens=1024
        ),
        speculation=Speculation(algorithm="eagle3", draft_model_path=str(draft)),
    )
    return [node_plan(cluster, role, name, MODELS / "tiny-target", draft) for role in ("prefill", "decode")]


def test_the_second_half_uses_the_model_and_the_draft_of_the_first() -> None:
    log = Log("flex-0")
    with StartupReporter(None, log) as reporter:
        first, second = halves("cpu")
        prefill = serving_model.load_serving_model(first, SoleRank(reporter), log)
        decode = serving_model.load_serving_model(second, SoleRank(reporter), log, loaded=prefill)
    assert decode.model is prefill.model
    assert decode.draft is prefill.draft is not None
    assert [each.num_pages for each in (prefill, decode)] == [512 // 16 + 1, 1024 // 16 + 1]
    assert decode.kv_fingerprint == prefill.kv_fingerprint, "their pages can be exchanged"


def test_the_weights_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(device_memory, "check_memory", lambda *given: asked.append(given))
    for plan in halves("cuda:0"):
        device_memory.check_memory_before_loading(plan, torch.device("cuda", 0), WHOLE)
    (_, prefill, beside_prefill, key, *_), (_, decode, beside_decode, other, *_) = asked
    assert prefill.weights > 0
    assert decode.weights == 0
    assert (beside_prefill, beside_decode) == (decode.total, prefill.total)
    assert (key, other) == ("movable.prefill_pool_tokens", "movable.decode_pool_tokens")


def test_what_the_first_half_has_taken_is_no_room_of_the_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "RELEASE_SECONDS", 0.0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (2 * GIB, 9 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 4 * GIB)
    log = Log("flex-0")
    with StartupReporter(None, log) as reporter:
        served = serving_model.load_serving_model(halves("cpu")[0], SoleRank(reporter), log)
    own = serving_model.NodeMemory(PoolBudget(512, 0.4, "decode", movable=True), MemoryPlan(0, 0))
    first = replace(served, memory=own)
    second = replace(served, memory=replace(own, before=4 * GIB))
    assert first.with_pool(GIB).num_pages == 33
    with pytest.raises(ConfigError, match=r"movable.decode_pool_tokens: .* 2.00 GiB of 9.00 GiB are free"):
        second.with_pool(GIB)


def test_a_movable_node_needs_its_own_process() -> None:
    check_process("decode-0", False, ALONE)
    with pytest.raises(ConfigError, match="flex-0 is a movable node; start it with deploy/launch_movable"):
        check_process("flex-0", True, ALONE)
