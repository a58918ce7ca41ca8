"""A node that serves a model with a state per request: slots, memory, and what such a model does not allow."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from common.checkpoint.families import FAMILIES
from common.config.resolve_node import node_plan
from common.config.schema import (
    Cluster,
    DecodeNodeEntry,
    DecodeSection,
    Model,
    PrefillNodeEntry,
    PrefillSection,
    PrefixCaching,
    Speculation,
)
from common.engine.host_memory import GIB
from common.engine.layers.placement import Placement
from common.errors import ConfigError
from common.kv_cache.layer_kinds import MIXERS
from common.kv_cache.radix_cache import RadixCache
from common.named import named
from common.node.memory import MemoryPlan, plan_pool
from common.node.serving_model import ServingModel, load_serving_model, page_space
from common.node_plan import PoolBudget
from common.observability.logs import Log
from common.observability.startup import StartupReporter
from tests.cluster.harness import MODEL
from tests.fakes.toy_state.checkpoint import write_checkpoint
from tests.fakes.toy_state.record import ARCHITECTURE, KEY, ROWS, VALUE

HEADS = 4
STATE_BYTES = 2 * HEADS * KEY * VALUE * 4  # two recurrent layers
WINDOW = HEADS * (KEY + VALUE + 1)  # values of a token


@pytest.fixture
def path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setitem(FAMILIES, ARCHITECTURE, named(ROWS[0][1].partition("=")[2]))
    for _, row in ROWS[1:]:
        name, _, record = row.partition("=")
        monkeypatch.setitem(MIXERS, name, record)
    write_checkpoint(MODEL, tmp_path / "model", ("latent", "recurrent", "recurrent"))
    return tmp_path / "model"


def load(
    path: Path,
    role: str = "decode",
    draft: Path | None = None,
    snapshots: int | Literal["auto"] = 4,
    cache: PrefixCaching = "auto",
    **speculation: Any,
) -> ServingModel:
    cluster = Cluster(
        model=Model(path=str(path)),
        prefill=PrefillSection(
            nodes=(PrefillNodeEntry(name="n"),), max_batch=3, state_snapshots=snapshots, prefix_cache=cache
        ),
        decode=DecodeSection(nodes=(DecodeNodeEntry(name="n"),), max_running=5, max_transferring=2),
        speculation=Speculation(**speculation),
    )
    plan = node_plan(cluster, role, "n", path, draft)
    return load_serving_model(plan, StartupReporter(None, Log("test")), Log("test"))


def test_every_request_that_may_hold_pages_has_a_slot(path: Path) -> None:
    """On decode nodes these are running, arriving and quarantined requests; on prefill nodes computed and sent ones."""
    decode, prefill = load(path, algorithm="ngram", steps=2), load(path, "prefill")
    assert (decode.layout.num_slots, prefill.layout.num_slots) == (1 + 5 + 2 * 2, 1 + 2 * 3 + 4)
    assert (decode.snapshot_slots, prefill.snapshot_slots) == (range(10, 10), range(7, 11))
    assert decode.spec.state_bytes == STATE_BYTES
    assert decode.state.window.widths == {1: WINDOW, 2: WINDOW}
    assert (decode.state.window.tokens, prefill.state.window.tokens) == (3, 0)
    assert load(path).state.window.tokens == 1
    told = decode.describe(0, "tcp", 5)
    assert (told["state_slots"], told.get("prefix_cache")) == (9, None)
    assert (told["state_snapshots"], told["state_snapshot_bytes"]) == (0, 0)
    told = prefill.describe(0, "tcp", 5)
    assert (told["state_slots"], str(told["prefix_cache"])[:3]) == (6, "on:")
    assert (told["state_snapshots"], told["state_snapshot_bytes"]) == (4, 4 * STATE_BYTES)


def test_there_are_no_more_slots_than_pages(path: Path) -> None:
    """Each request holds a page at least, and a snapshot too; the trial of the graphs has one page and one slot."""
    assert replace(load(path), num_pages=2).layout.num_slots == 2
    assert replace(load(path, "prefill"), num_pages=2).layout.num_slots == 3


def test_a_model_with_pages_only_has_neither(path: Path) -> None:
    served = load(MODEL)
    assert (served.layout.num_slots, served.state.window.nbytes(5), served.spec.state_bytes) == (0, 0, 0)
    assert "state_slots" not in served.describe(0, "tcp", 5)
    assert page_space(served, "auto").cache.check_integrity() is None
    assert type(page_space(served, "auto").cache) is type(page_space(served, True).cache)
    assert type(page_space(served, "auto").cache) is not type(page_space(served, False).cache)


@pytest.mark.parametrize(("cache", "kept"), [("auto", True), (True, True), (False, False)])
def test_a_decode_node_caches_pages_without_snapshots(path: Path, cache: PrefixCaching, kept: bool) -> None:
    space = page_space(load(path), cache)
    assert (space.cache.snapshots.total, space.total_slots) == (0, 9)
    assert isinstance(space.cache, RadixCache) == kept


@pytest.mark.parametrize(
    ("snapshots", "cache", "kept"), [(4, "auto", 4), (4, True, 4), (0, "auto", 0), (4, False, 0)]
)
def test_a_prefill_node_caches_prefixes_if_it_keeps_snapshots(
    path: Path, snapshots: int, cache: PrefixCaching, kept: int
) -> None:
    served = load(path, "prefill", snapshots=snapshots, cache=cache)
    space = page_space(served, cache)
    assert (space.cache.snapshots.total, space.total_slots) == (kept, 6)
    assert isinstance(space.cache, RadixCache) == (kept > 0)


def test_the_number_of_snapshots_follows_the_pool_unless_it_is_given(path: Path) -> None:
    """A third of the pages' bytes are added to what 32 states take, and no rank takes more than it has planned."""
    served = load(path, "prefill", snapshots="auto")
    assert (
        len(served.snapshot_slots) == 32 + served.num_pages * served.spec.page_bytes // (3 * STATE_BYTES) > 40
    )
    total, plan = 1 << 22, MemoryPlan(0, 0, 0, snapshots=32 * STATE_BYTES)
    cost = served.state.snapshots.page_cost(served.spec, served.held)
    pages = plan_pool(total, plan, PoolBudget(None, 1.0, "prefill"), cost)
    filled = replace(served, num_pages=pages)
    taken = pages * served.held.page_bytes + len(filled.snapshot_slots) * served.held.state_bytes
    assert total - cost - STATE_BYTES < taken <= total
    fixed = load(path, "prefill", snapshots=7)
    assert fixed.state.snapshots.page_cost(fixed.spec, fixed.held) == fixed.held.page_bytes
    assert len(replace(fixed, num_pages=pages).snapshot_slots) == 7


def test_a_required_prefix_cache_needs_snapshots(path: Path) -> None:
    served = load(path, "prefill", snapshots=0, cache=True)
    with pytest.raises(ConfigError, match=r"prefill\.prefix_cache: .*prefill\.state_snapshots above 0"):
        page_space(served, True)


def test_the_reported_plan_counts_states_once(path: Path) -> None:
    """The pool's memory holds pages and states; the plan on a GPU names them separately."""
    served, plan = load(path, "prefill"), MemoryPlan(GIB, 0, 0, state=2 * GIB, snapshots=GIB)
    on_gpu = Placement(torch.float32, torch.device("cuda"))
    memory, state = replace(served.memory, plan=plan), replace(served.state, requests=1 << 21)
    served = replace(served, memory=memory, placement=on_gpu, num_pages=1 << 22, state=state)
    pages = (1 << 22) * served.page_size * served.spec.token_bytes
    told = served.describe(served.layout.total_bytes, "tcp", 5)
    assert told["memory_plan"] == str(replace(plan, pool=pages, snapshots=4 * STATE_BYTES))
    assert served.layout.total_bytes > pages + GIB


def test_trees_and_drafts_with_a_state_are_refused(path: Path) -> None:
    with pytest.raises(ConfigError, match=r"speculation\.topk: must be 1: this model keeps a state"):
        load(path, algorithm="ngram", steps=2, topk=2)
    with pytest.raises(
        ConfigError, match=r"speculation\.draft_model_path: .* keeps a state per request \(layer 1\)"
    ):
        load(path, draft=path, algorithm="standalone", steps=2)


def test_the_memory_plan_counts_states() -> None:
    plan = MemoryPlan(weights=GIB, pool=GIB, working=0, state=3 * GIB)
    assert plan.total == 5 * GIB
    assert "+ state of requests 3.00 GiB" in str(plan)
    assert str(replace(plan, snapshots=2 * GIB)).endswith("+ states of cached prefixes 2.00 GiB = 7.00 GiB")
    assert "state of requests" not in str(MemoryPlan(GIB, GIB))
