"""Prefix caching of a model with gated delta layers on a real pair of nodes: texts are those without a cache."""

from __future__ import annotations

from dataclasses import replace

import pytest

from common.checkpoint.families import LayerKind
from common.kv_cache.layer_kinds import MIXERS
from tests.fakes.draft_models import drafting
from tests.fakes.node_cluster import ONE_BEHIND, NodeCluster, Shape
from tests.fakes.tiny_model import CONFIG, VOCAB
from tests.fakes.toy_state.record import ROWS
from tests.unit.decode_node.test_gated_delta import SERVED, expected

STEPS = 3
TEXT = [(11 * i + i * i) % VOCAB for i in range(230)]
# prompt, tokens that come from the cache once those before it are served
TURNS = [
    (TEXT[:150], 0),
    (TEXT[:150], 128),
    (TEXT[:215], 128),  # a conversation goes on
    (TEXT[:100] + TEXT[200:230], 0),  # branches off at 100: the state after 64 is saved by it
    (TEXT[:80] + TEXT[120:200], 64),
    (TEXT[:129], 128),
    (TEXT[:128], 64),
    (TEXT[:64], 0),
]
SHAPE = Shape(model=SERVED, prefill_snapshots=8, completion=ONE_BEHIND)


def serve(cluster: NodeCluster, prompt: list[int], count: int = 3) -> int | None:
    """Serve a prompt alone, compare its text, and return how many tokens came from the cache."""
    call = cluster.submit(prompt, count)
    cluster.run()
    assert call.ids == expected(tuple(prompt), count)
    cluster.settle()
    assert cluster.prefill.space.cache.snapshots.writing == 0
    return call.cached_tokens


@pytest.mark.parametrize(
    ("graphs", "chunk"), [("none", 64), ("breakable", 64), ("breakable", 192), ("piecewise", 1024)]
)
def test_texts_and_cached_tokens(graphs: str, chunk: int) -> None:
    """Borders lie inside chunks and at their ends."""
    with NodeCluster(replace(SHAPE, prompt_graphs=graphs, chunk_tokens=chunk)) as cluster:
        assert [serve(cluster, prompt) for prompt, _ in TURNS] == [cached for _, cached in TURNS]
        said = cluster.prefill.link.counters
        assert said.cached_tokens == sum(cached for _, cached in TURNS)


def test_prompts_at_once_with_few_snapshots() -> None:
    """They share forwards, replace each other's states and end in any order; one is aborted on its way."""
    shape = replace(
        SHAPE, prefill_snapshots=2, prefill_slots=4, chunk_tokens=128, layers=True, prompt_graphs="none"
    )
    with NodeCluster(shape) as cluster:
        for _ in range(2):
            calls = [cluster.submit(prompt, 3) for prompt, _ in TURNS]
            cluster.turn(4)
            cluster.abort(calls[2])
            cluster.run()
            kept = [call for call in calls if call is not calls[2]]
            assert [call.ids for call in kept] == [expected(tuple(call.prompt), 3) for call in kept]
            cluster.settle()
            cluster.prefill.space.check_integrity()
            assert cluster.prefill.space.cache.snapshots.writing == 0
        assert any(call.cached_tokens for call in calls)


@pytest.mark.parametrize("name", ["eagle3", "eagle"])
def test_drafts_after_a_hit_are_those_without_a_cache(name: str) -> None:
    """KV of the draft in reused pages is that of the same tokens: as many drafts are accepted."""
    draft, step = drafting(name, STEPS)
    shape = replace(SHAPE, draft=draft, step=step, round_tokens=STEPS + 1, prefill_batch=2)
    totals = []
    for snapshots in (0, 8):
        with NodeCluster(replace(shape, prefill_snapshots=snapshots)) as cluster:
            cached = [serve(cluster, prompt, 10) for prompt in (TEXT[:150], TEXT[:150], TEXT[:215])]
            assert cached == ([0, 128, 128] if snapshots else [0, 0, 0])
            said = cluster.decode.link.counters
            totals.append((said.spec_drafts, said.spec_accepted_tokens))
    assert totals[0] == totals[1]


def test_a_lost_decode_node_after_a_hit() -> None:
    with NodeCluster(replace(SHAPE, decodes=2)) as cluster:
        assert serve(cluster, TEXT[:150]) == 0
        call = cluster.submit(TEXT[:150], 12)
        cluster.run(lambda: len(call.output) > 3)
        cluster.kill(call.decode)
        cluster.lose(call.decode)
        cluster.run()
        assert call.ids == expected(tuple(TEXT[:150]), 12)
        assert (call.attempts, call.cached_tokens) == (2, 128)
        cluster.settle()


def test_without_snapshots_nothing_is_reused() -> None:
    with NodeCluster(replace(SHAPE, prefill_snapshots=0)) as cluster:
        assert [serve(cluster, TEXT[:150]) for _ in range(2)] == [0, 0]
        assert cluster.prefill.space.cache.cached_pages == 0


def test_a_salt_has_its_own_states() -> None:
    with NodeCluster(SHAPE) as cluster:
        for salt, cached in ((b"a", 0), (b"b", 0), (b"a", 128)):
            call = cluster.submit(TEXT[:150], 3, salt=salt)
            cluster.run()
            assert (call.ids, call.cached_tokens) == (expected(tuple(TEXT[:150]), 3), cached)


def test_any_mixer_with_a_state_can_be_continued(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recurrence that prompts may be cut anywhere: states are saved at ends of pages."""
    for _, row in ROWS[1:]:
        name, _, record = row.partition("=")
        monkeypatch.setitem(MIXERS, name, record)
    served = replace(CONFIG, layer_kinds=(LayerKind("latent"), LayerKind("recurrent")))
    texts = []
    for snapshots in (0, 4):
        shape = Shape(model=served, prefill_snapshots=snapshots, page_size=4, chunk_tokens=16)
        with NodeCluster(shape) as cluster:
            calls = []
            for prompt in (TEXT[:30], TEXT[:30], TEXT[:50]):
                calls.append(cluster.submit(prompt, 5))
                cluster.run()
            texts.append([call.ids for call in calls])
            assert [call.cached_tokens for call in calls] == ([0, 28, 28] if snapshots else [0, 0, 0])
    assert texts[0] == texts[1]
