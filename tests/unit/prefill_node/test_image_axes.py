"""Positions on three axes through both nodes: both compute the same positions after a prompt's images.

The tests are those of test_vision.py with a target and heads whose rotary embedding has sections, and with images of
different sizes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from tests.fakes.draft_models import CONFIGS, branching
from tests.fakes.drafters import ngram
from tests.fakes.node_cluster import NodeCluster, Shape
from tests.fakes.tiny_model import AXES
from tests.fakes.vision import (
    Part,
    Prompts,
    Seen,
    TinyVision,
    eager_drafts,
    greedy,
    observed_vision,
    prompt_of,
)

TEXT: tuple[Part, ...] = (3, 9, 27, 4, 8, 16, 5)
FIRST: tuple[Part, ...] = ((100,), 7, 8)
MIDDLE: tuple[Part, ...] = (5, 6, (102,), 9, 10, 11)
LAST: tuple[Part, ...] = (4, 4, (103,))
TWO: tuple[Part, ...] = (1, (101,), 4, (102,), 2, (104,), 3)
ALL = (TEXT, FIRST, MIDDLE, LAST, TWO)
NUMBERS = (100, 101, 102, 103, 104)


@contextmanager
def image_cluster(**rest: Any) -> Iterator[tuple[NodeCluster, TinyVision]]:
    vision = TinyVision()
    cluster = NodeCluster(replace(Shape(), vision_stage=vision, model=AXES, **rest))
    try:
        vision.send(*NUMBERS)
        yield cluster, vision
    finally:
        vision.close()
        cluster.close()


def answers_of(cluster: NodeCluster, prompts: tuple[tuple[Part, ...], ...], count: int) -> None:
    """Submit all prompts at once; every answer equals the eager target's."""
    calls = []
    for parts in prompts:
        ids, spans = prompt_of(parts)
        calls.append((parts, cluster.submit(ids, count, images=spans)))
    cluster.run()
    for parts, call in calls:
        assert call.error is None
        assert call.ids == greedy(parts, count, AXES), parts


def test_the_axes_of_an_image_change_the_text() -> None:
    """Axes must matter, or the tests below would prove nothing."""
    assert any(greedy(parts, 9, AXES) != greedy(parts, 9) for parts in ALL[1:])
    plain = replace(AXES, rope=replace(AXES.rope, sections=()))
    assert greedy(TEXT, 9, AXES) == greedy(TEXT, 9, plain), "without images all axes agree"
    assert sum(greedy(parts, 9, AXES) != greedy(parts, 9, plain) for parts in ALL) >= 3


@pytest.mark.parametrize(("chunk", "graphs"), [(3, "breakable"), (30, "breakable"), (7, "piecewise")])
def test_any_chunks_of_mixed_batches_under_graphs(chunk: int, graphs: str) -> None:
    with image_cluster(chunk_tokens=chunk, prompt_graphs=graphs) as (cluster, _):
        answers_of(cluster, ALL, 9)
        cluster.settle()
        (totals, *_) = cluster.prefill.link.counters.graphs
        assert totals.replays > 0
        assert not totals.fallbacks


@pytest.mark.parametrize("page_size", [1, 4])
def test_prefix_hits_keep_their_positions(page_size: int) -> None:
    longer: tuple[Part, ...] = (*TWO, 7, 8, (103,), 9)
    with image_cluster(page_size=page_size) as (cluster, _):
        for parts in (TWO, longer, (*TWO, 7, 9), longer):
            ids, spans = prompt_of(parts)
            call = cluster.submit(ids, 6, images=spans)
            cluster.run()
            assert call.ids == greedy(parts, 6, AXES)
            cluster.settle()
        assert call.cached_tokens is not None
        assert call.cached_tokens >= len(ids) - 1 - page_size


def test_a_retracted_request_continues_at_its_position() -> None:
    """Its row is written again at resume; if its KV was dropped, another node computes its prompt again."""
    for backup in (1 << 24, 0):
        with image_cluster(decode_pool=56, page_size=4, reserved_tokens=1, backup_bytes=backup) as (
            cluster,
            _,
        ):
            prompts = (TWO, MIDDLE, LAST)
            calls = []
            for parts in prompts:
                ids, spans = prompt_of(parts)
                calls.append((parts, cluster.submit(ids, 16, images=spans)))
            cluster.run()
            for parts, call in calls:
                assert call.error is None
                assert call.ids == greedy(parts, 16, AXES), (parts, backup)
            assert cluster.decode.link.counters.retractions > 0


@pytest.mark.parametrize(
    ("name", "chunk", "buckets"), [("eagle3-axes", 3, (1, 4)), ("eagle3-axes", 64, ()), ("eagle-axes", 5, ())]
)
def test_drafts_have_the_positions_of_the_target(name: str, chunk: int, buckets: tuple[int, ...]) -> None:
    """On both nodes every draft equals that of an eager recompute with transformers' positions."""
    assert CONFIGS[name].model.rope == AXES.rope
    prompts, noted = Prompts(*ALL), Seen()
    draft, step = observed_vision(name, 3, 0.7, prompts, noted, buckets)
    with image_cluster(chunk_tokens=chunk, draft=draft, step=step) as (cluster, _):
        answers_of(cluster, ALL, 9)
        cluster.settle()
        assert cluster.decode.link.counters.avg_spec_accept_length > 1.5
    assert len(noted) >= 10
    for parts, told, drafts in noted:
        assert drafts == eager_drafts(name, parts, told, 3)[: len(drafts)], (parts, told)


def test_positions_of_tree_nodes_follow_their_depth() -> None:
    """Positions follow the depth after images as after text, whichever slots hold the keys."""
    draft, step = branching("eagle3-axes", 3, 2, 6)
    with image_cluster(draft=draft, step=step) as (cluster, _):
        answers_of(cluster, (TWO, LAST), 12)
        cluster.settle()


@pytest.mark.parametrize("buckets", [(), (1, 4)])
def test_drafts_of_the_text_itself(buckets: tuple[int, ...]) -> None:
    with image_cluster(step=ngram(3, buckets)) as (cluster, _):
        answers_of(cluster, ALL, 12)
        cluster.settle()
