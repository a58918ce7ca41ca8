"""Cached prefixes in host memory on a node of two ranks: each keeps its share, and rank 0 decides for both."""

from __future__ import annotations

import pytest

from tests.fakes.node_cluster import Call, HostShape, NodeCluster
from tests.fakes.ranked_cluster import RankedCluster

HOST = HostShape(blocks=40)
POOL = ("model.max_model_len=208", "prefill.pool_tokens=208")  # one session and a half
SESSIONS = [[(7 * n + 31 * i + i * i) % 610 + 20 for i in range(120)] for n in range(3)]
BLOCK, WHOLE = 32, 96  # tokens of a block, and of the whole blocks of a session
OUTPUT = 6


def serve(cluster: NodeCluster, prompt: list[int]) -> Call:
    call = cluster.submit(prompt, OUTPUT)
    cluster.run()
    cluster.settle()
    return call


@pytest.mark.parametrize("file", ["local-plain.yaml", "local-eagle3.yaml"])
def test_sessions_that_take_turns_are_computed_once(file: str) -> None:
    with RankedCluster(file, 1) as one:
        expected = [serve(one, each).ids for each in SESSIONS]
    with RankedCluster(file, 2, POOL, HOST) as cluster:
        first = [serve(cluster, each) for each in SESSIONS]
        again = [serve(cluster, each) for each in SESSIONS]
        said = cluster.prefill.link.counters
    assert [each.ids for each in first] == [each.ids for each in again] == expected
    assert [each.cached_tokens for each in first] == [0] * len(SESSIONS)
    assert [each.cached_tokens for each in again] == [WHOLE] * len(SESSIONS)
    assert said.host_loads == len(SESSIONS)
    assert said.host_checksum_failures == 0


def test_what_has_changed_on_another_rank_is_computed_again() -> None:
    """The bytes of rank 0 are as they were, and yet it uses nothing of the load."""
    ranked = RankedCluster("local-plain.yaml", 2, POOL, HOST)
    with ranked as cluster:
        expected = [serve(cluster, each).ids for each in SESSIONS]
        (store,) = ranked.rank_stores
        store.memory[:] += 1
        found = serve(cluster, SESSIONS[0])
        assert found.ids == expected[0]
        assert [failed.code for failed in cluster.failures] == ["cache_damaged"]
        assert found.cached_tokens == 0
        assert cluster.prefill.link.counters.host_checksum_failures == WHOLE // BLOCK
