"""A node that serves a model with a state per request: slots, memory, and what such a model does not allow."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from common.checkpoint.families import FAMILIES
from common.config.resolve_node import node_plan
from common.config.schema import (
    Cluster,
    DecodeNode,
    DecodeSection,
    Model,
    PrefillNode,
    PrefillSection,
    Speculation,
)
from common.engine.host_memory import GIB
from common.errors import ConfigError
from common.kv_cache.layer_kinds import MIXERS
from common.named import named
from common.node.memory import MemoryPlan
from common.node.serving_model import ServingModel, load_serving_model, page_space
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


def load(path: Path, role: str = "decode", draft: Path | None = None, **speculation: Any) -> ServingModel:
    cluster = Cluster(
        model=Model(path=str(path)),
        prefill=PrefillSection(nodes=(PrefillNode(name="n"),), max_batch=3),
        decode=DecodeSection(nodes=(DecodeNode(name="n"),), max_running=5, max_transferring=2),
        speculation=Speculation(**speculation),
    )
    plan = node_plan(cluster, role, "n", path, draft)
    return load_serving_model(plan, StartupReporter(None, Log("test")), Log("test"))


def test_every_request_that_may_hold_pages_has_a_slot(path: Path) -> None:
    """On decode nodes these are running, arriving and quarantined requests; on prefill nodes computed and sent ones."""
    decode, prefill = load(path, algorithm="ngram", steps=2), load(path, "prefill")
    assert (decode.layout.num_slots, prefill.layout.num_slots) == (1 + 5 + 2 * 2, 1 + 2 * 3)
    assert decode.spec.state_bytes == STATE_BYTES
    assert decode.window.widths == {1: WINDOW, 2: WINDOW}
    assert (decode.window.tokens, prefill.window.tokens) == (3, 0)
    assert load(path).window.tokens == 1
    told = decode.describe(0, "tcp", 5)
    assert (told["state_slots"], str(told["prefix_cache"])[:4]) == (9, "off:")


def test_there_are_no_more_slots_than_pages(path: Path) -> None:
    """Each request holds a page at least; the trial of the graphs has one page and one slot."""
    assert replace(load(path), num_pages=2).layout.num_slots == 2


def test_a_model_with_pages_only_has_neither(path: Path) -> None:
    served = load(MODEL)
    assert (served.layout.num_slots, served.window.nbytes(5), served.spec.state_bytes) == (0, 0, 0)
    assert "state_slots" not in served.describe(0, "tcp", 5)
    assert page_space(served, "auto").cache.check_integrity() is None
    assert type(page_space(served, "auto").cache) is type(page_space(served, True).cache)
    assert type(page_space(served, "auto").cache) is not type(page_space(served, False).cache)


def test_the_prefix_cache_is_off_and_refused(path: Path) -> None:
    served = load(path)
    space = page_space(served, "auto")
    assert type(space.cache) is type(page_space(served, False).cache)
    assert space.total_slots == 9
    with pytest.raises(
        ConfigError, match=r"decode\.prefix_cache: must be off: the model keeps a state per request"
    ):
        page_space(served, True)


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
    assert "state of requests" not in str(MemoryPlan(GIB, GIB))
