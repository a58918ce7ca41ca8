"""Two nodes whose pages hold FP8 give the tokens of a reference that rounds alike, however the work is divided."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pytest
from torch import Tensor

from common.engine.attention import paged
from common.engine.ops import converted_attention as conversion
from common.engine.ops.converted_attention import converted_attention
from common.kv_cache.kv_values import FP8, KvValues
from common.node.completion import Deferred
from tests.fakes.draft_models import observed
from tests.fakes.drafters import foresight
from tests.fakes.node_cluster import NodeCluster, NoDraftModel, Shape, autoregressive
from tests.fakes.rounded_attention import rounded_continuation
from tests.fakes.scenarios import prompt_of
from tests.fakes.tiny_model import VOCAB, tiny_model

KV = KvValues(FP8, {(0, "k"): 0.25, (0, "v"): 2.0, (1, "v"): 0.5})
COUNT = 24
EAGLE = observed("eagle3", 3, 0.7, [])


@functools.cache
def continuation(prompt: tuple[int, ...], count: int) -> list[int]:
    """The reference of all tests, which share prompts."""
    return rounded_continuation(tiny_model(), prompt, count, KV)


def expect(cluster: NodeCluster, prompts: Sequence[list[int]], count: int = COUNT) -> None:
    """Serve the prompts at once; every text is the reference's, and nothing leaks."""
    calls = [cluster.submit(prompt, count) for prompt in prompts]
    cluster.run()
    assert [call.ids for call in calls] == [continuation(tuple(each), count) for each in prompts]
    cluster.settle()


def test_rounding_changes_texts() -> None:
    """Otherwise the following tests would also pass over pages in float32."""
    prompts = [prompt_of(n) for n in (9, 33, 65)]
    exact = [rounded_continuation(tiny_model(), each, COUNT, KvValues(FP8)) for each in prompts]
    with NodeCluster(Shape()) as cluster:
        calls = [cluster.submit(prompt, COUNT) for prompt in prompts]
        cluster.run()
        assert [call.ids for call in calls] != exact


@pytest.mark.parametrize(
    ("chunk", "draft"), [(1, "none"), (7, "eagle3"), (64, "none"), (64, "eagle3"), (512, "eagle3")]
)
def test_chunks(chunk: int, draft: str) -> None:
    model, step = (NoDraftModel(), autoregressive) if draft == "none" else EAGLE
    shape = Shape(kv=KV, chunk_tokens=chunk, page_size=4, completion=Deferred, draft=model, step=step)
    with NodeCluster(shape) as cluster:
        spec = cluster.decode.pool.layout.spec
        assert spec.page_bytes == 4 * (2 * 2 * 2 * 8 + (0 if draft == "none" else 2 * 2 * 8))
        expect(cluster, [prompt_of(n) for n in (1, 9, 65)])


@pytest.mark.parametrize("chunk", [7, 64])
def test_pages_that_are_converted_once(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of more than four tokens count as long. Seven are padded to eight."""
    counts: list[int] = []

    def counted(query: Tensor, *rest: Any) -> Tensor:
        counts.append(len(query))
        return converted_attention(query, *rest)

    monkeypatch.setattr(conversion, "MIN_BATCH_TOKENS", 4)
    monkeypatch.setattr(paged, "converted_attention", counted)
    with NodeCluster(Shape(kv=KV, chunk_tokens=chunk, page_size=4)) as cluster:
        expect(cluster, [prompt_of(65)])
    assert min(counts) > 4
    assert max(counts) == max(8, chunk)


def test_prefix_hits_trees_and_layers() -> None:
    """A second prompt continues cached pages; accepted branches of trees are moved; pages leave layer by layer."""
    first = prompt_of(13)
    shape = Shape(kv=KV, page_size=4, step=foresight(0.8, 7, 2), layers=True)
    with NodeCluster(shape) as cluster:
        expect(cluster, [first])
        for shared in (4, 9, 13):
            expect(cluster, [first[:shared] + [(token + 1) % VOCAB for token in first[shared:]] + [5, 6]], 8)
        assert cluster.decode.link.counters.spec_accepted_tokens > 0


def test_retracted_requests_resume() -> None:
    shape = Shape(kv=KV, page_size=4, decode_pool=96, reserved_tokens=4, max_running=4)
    with NodeCluster(shape) as cluster:
        expect(cluster, [prompt_of(10 + n, n) for n in range(4)], 40)
        assert cluster.decode.link.counters.retractions > 0
        assert not cluster.failures
