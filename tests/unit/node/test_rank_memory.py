"""Ranks on GPUs of different sizes: the smallest one decides what the node serves, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from common.config.resolve_node import node_plan
from common.config.schema import (
    Cluster,
    DecodeNodeEntry,
    DecodeSection,
    Model,
    PrefillNodeEntry,
    PrefillSection,
)
from common.engine.host_memory import GIB
from common.errors import ConfigError
from common.kv_cache.shard import Shard
from common.node import graph_start, memory
from common.node.device_memory import check_memory_before_loading
from tests.unit.node.ranks.test_device_group import Meeting
from tests.unit.node.test_graph_start import PAGE, TOKENS, served

MODEL = Path(__file__).parents[3] / "deploy/tiny_models/tiny-target"


def check_ranks(
    monkeypatch: pytest.MonkeyPatch, sizes: Sequence[int], tokens: int | Literal["auto"]
) -> list[str]:
    """Check both ranks of a decode node on GPUs of these bytes; return what each is refused for, "" for nothing."""
    monkeypatch.setattr(memory, "RELEASE_SECONDS", 0.0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: 2 * (sizes[device.index - 2],))
    prefill = PrefillSection(nodes=(PrefillNodeEntry(name="p", devices=("cuda:0", "cuda:1")),))
    decode = DecodeSection(
        nodes=(DecodeNodeEntry(name="d", devices=("cuda:2", "cuda:3")),), pool_tokens=tokens
    )
    given = Cluster(model=Model(path=str(MODEL), dtype="bfloat16"), prefill=prefill, decode=decode)
    found = []
    for rank in range(2):
        plan = node_plan(given, "decode", "d", MODEL).of_rank(rank)
        try:
            check_memory_before_loading(plan, torch.device(plan.device), Shard(rank, 2))
            found.append("")
        except ConfigError as error:
            found.append(str(error))
    return found


def test_a_pool_that_the_smallest_gpu_has_no_room_for_is_refused_with_its_arithmetic(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each rank counts its half of the pool on its own GPU."""
    tokens = 8 << 20  # of 2,048 bytes on a rank: 16 GiB
    accepted, refused = check_ranks(monkeypatch, [24 * GIB, 16 * GIB], tokens)
    assert accepted == ""
    assert refused.startswith(
        "decode.pool_tokens: does not fit on cuda:3: weights 0.00 GiB + KV pool 16.00 GiB + "
    )
    assert (
        ", 16.00 GiB of 16.00 GiB are free; with the other values unchanged there is room for 733" in refused
    )
    assert check_ranks(monkeypatch, [24 * GIB, 24 * GIB], tokens) == ["", ""]


def test_a_share_of_a_gpu_that_others_use_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    accepted, refused = check_ranks(monkeypatch, [24 * GIB, GIB], "auto")
    assert accepted == ""
    assert "0.9 of 1.00 GiB is 0.90 GiB, which leaves no room for KV" in refused


def test_the_smallest_pool_is_that_of_all_ranks() -> None:
    meeting, own = Meeting(), served(TOKENS)

    def agree(rank: int) -> Any:
        exchange: Callable[[bytes], Sequence[bytes]] = meeting.of(rank)
        return graph_start.agreed(
            replace(own, num_pages=(9, 5)[rank], max_model_len=(64, 8 * PAGE)[rank]), exchange
        )

    with ThreadPoolExecutor(2) as ranks:
        found = list(ranks.map(agree, range(2)))
    assert [(each.num_pages, each.max_model_len) for each in found] == [(5, 64)] * 2
