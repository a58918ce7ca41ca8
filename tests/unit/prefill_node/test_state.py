"""State slots on a prefill node: a prompt has one from admission until its transfer has settled."""

from __future__ import annotations

from dataclasses import replace

import pytest

from common.checkpoint.families import LayerKind
from common.kv_cache.layer_kinds import MIXERS
from tests.fakes.node_cluster import NodeCluster, Shape
from tests.fakes.tiny_model import CONFIG
from tests.fakes.toy_state.record import ROWS

SERVED = replace(CONFIG, layer_kinds=(LayerKind("latent"), LayerKind("recurrent")))


@pytest.fixture(autouse=True)
def rows(monkeypatch: pytest.MonkeyPatch) -> None:
    for _, row in ROWS[1:]:
        name, _, record = row.partition("=")
        monkeypatch.setitem(MIXERS, name, record)


def test_a_prompt_without_a_grant_never_takes_the_last_slot() -> None:
    """It waits for pages on a decode node, and would keep the slot from a prompt that has them already."""
    with NodeCluster(Shape(model=SERVED, prompt_graphs="none", prefill_slots=2)) as cluster:
        space = cluster.prefill.space
        early = [cluster.submit([7, i, 9, 11], 3, legs="p") for i in (1, 2)]
        cluster.turn(20)
        assert (space.leased_slots, space.free_slots) == (1, 1)
        granted = cluster.submit([7, 3, 9, 11], 3)
        cluster.run(lambda: granted.over)
        assert granted.finish == "length"
        for call in early:
            cluster.send_leg(call, "d")
        cluster.run()
        cluster.settle()
        assert space.leased_slots == 0


def test_a_prompt_that_ends_early_gives_its_slot_back() -> None:
    with NodeCluster(Shape(model=SERVED, prompt_graphs="none", chunk_tokens=4)) as cluster:
        call = cluster.submit(list(range(1, 40)), 3)
        cluster.run(lambda: cluster.prefill.space.leased_slots == 1)
        cluster.abort(call)
        cluster.settle()
        assert cluster.prefill.space.leased_slots == cluster.decode.space.leased_slots == 0
