"""A model with a latent plane and a per-request plane on a real pair of nodes, against a reference without a cache."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest

from common.checkpoint.families import LayerKind
from common.kv_cache.layer_kinds import MIXERS
from tests.fakes.covering import every_value
from tests.fakes.drafters import ngram
from tests.fakes.late_lane import LateLane
from tests.fakes.node_cluster import ONE_BEHIND, MakeStep, NodeCluster, Shape, autoregressive
from tests.fakes.tiny_model import CONFIG, VOCAB, tiny_model
from tests.fakes.toy_state.record import ROWS
from tests.fakes.toy_state.reference import continuation

MIXED = ("latent", "recurrent", "recurrent")
SERVED = replace(
    CONFIG, num_layers=3, sliding_windows=(None,) * 3, layer_kinds=tuple(LayerKind(each) for each in MIXED)
)
PROMPTS = [[(7 * n + 3 * i + i * i) % VOCAB for i in range(n)] for n in (3, 20, 50, 33, 1)]
STEPS = 3  # drafts of a round
MAX_TOKENS = 60  # tokens of an answer


@pytest.fixture(autouse=True)
def _mixers(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are known by their rows."""
    for _, row in ROWS[1:]:
        name, _, record = row.partition("=")
        monkeypatch.setitem(MIXERS, name, record)


@functools.cache
def expected(prompt: tuple[int, ...]) -> list[int]:
    tensors = {piece.name: piece.into for piece in tiny_model(config=SERVED).pieces()}
    return continuation(tensors, SERVED, list(prompt), MAX_TOKENS)


def check(cluster: NodeCluster, count: int, prompts: list[list[int]]) -> None:
    """Serve the prompts at once; every text is the reference's, and nothing leaks."""
    calls = [cluster.submit(prompt, count) for prompt in prompts]
    cluster.run()
    assert [call.ids for call in calls] == [expected(tuple(prompt))[:count] for prompt in prompts]
    cluster.settle()


@pytest.mark.parametrize(("graphs", "chunk"), every_value(("none", "breakable", "piecewise"), (64, 7)))
def test_prompts_in_chunks_and_decode_steps_ahead(graphs: str, chunk: int) -> None:
    """Prompts share forwards and are cut anywhere; slots are reused, whose stale states must not be read."""
    shape = Shape(
        model=SERVED,
        prompt_graphs=graphs,
        chunk_tokens=chunk,
        completion=ONE_BEHIND,
        prefill_slots=3,
        decode_slots=4,
    )
    with NodeCluster(shape) as cluster:
        check(cluster, 10, PROMPTS)
        check(cluster, 4, PROMPTS[::-1])


@pytest.mark.parametrize("buckets", [(), (2, 8)], ids=["eager", "graphs"])
def test_rounds_of_speculation(buckets: tuple[int, ...]) -> None:
    """Row E5: accepted tokens are added to the state in the next round, however many they were; launched ahead."""
    shape = Shape(model=SERVED, step=ngram(STEPS, buckets), completion=ONE_BEHIND, round_tokens=STEPS + 1)
    with NodeCluster(shape) as cluster:
        check(cluster, MAX_TOKENS, PROMPTS)
        said = cluster.decode.link.counters
        assert 20 < said.spec_accepted_tokens < said.spec_draft_tokens


@pytest.mark.parametrize("lane", [None, LateLane(asks=4)], ids=["at once", "late"])
@pytest.mark.parametrize("step", [autoregressive, ngram(STEPS)], ids=["plain", "ngram"])
def test_a_retracted_request_takes_its_state_along(step: MakeStep, lane: LateLane | None) -> None:
    """Row E5: it comes back to another slot and row, with tokens in its window that the state does not hold."""
    shape = Shape(
        model=SERVED,
        decode_pool=7 * 16,
        reserved_tokens=0,
        step=step,
        completion=ONE_BEHIND,
        round_tokens=STEPS + 1,
        lane=lane,
    )
    with NodeCluster(shape) as cluster:
        check(cluster, 40, [*PROMPTS, *PROMPTS[:2]])
        assert cluster.decode.link.counters.retractions > 1
        assert cluster.decode.backups.nbytes == cluster.decode.retraction.used_bytes == 0
