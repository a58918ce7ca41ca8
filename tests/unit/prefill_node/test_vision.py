"""Images through both nodes (rows C1 to C5): answers and drafts equal an eager recompute.

Both nodes are real and the prompt forwards of target and draft run under tape graphs. Every answer and every draft is
compared with an eager recompute over embeddings that are assembled one by one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from msgspec import structs

from common.engine.models.vision_part import Pixels
from common.errors import InvalidRequest
from common.messages.generation import ImageSpan
from common.messages.image_inbox import salted_digest
from prefill_node.draft import ModelPrefill
from prefill_node.image_intake import ImageIntake
from prefill_node.images import ARRIVAL_SECONDS, NoImages
from prefill_node.vision import MergedEmbeds, TextEmbeds
from tests.fakes.draft_models import StandaloneModel
from tests.fakes.node_cluster import Call, NodeCluster, Shape
from tests.fakes.tiny_model import VOCAB
from tests.fakes.vision import (
    TOKENS,
    DecodedIntake,
    Part,
    Prompts,
    Seen,
    TinyVision,
    digest_of,
    eager_drafts,
    greedy,
    observed_vision,
    prompt_of,
    read,
)
from tests.fakes.waiting import PATIENCE, until

TEXT: tuple[Part, ...] = (3, 9, 27, 4, 8, 16, 5)
FIRST: tuple[Part, ...] = ((1,), 7, 8)
MIDDLE: tuple[Part, ...] = (5, 6, (2,), 9, 10, 11)
LAST: tuple[Part, ...] = (4, 4, (3,))
TWO: tuple[Part, ...] = (1, (4,), (5,), 2, (4,), 3)
ALL = (TEXT, FIRST, MIDDLE, LAST, TWO)


@contextmanager
def image_cluster(
    cache_bytes: int = 1 << 20,
    reader: Callable[[bytes], Pixels] = read,
    make_intake: type[ImageIntake] = DecodedIntake,
    **rest: Any,
) -> Iterator[tuple[NodeCluster, TinyVision]]:
    vision = TinyVision(cache_bytes, reader, make_intake)
    cluster = NodeCluster(replace(Shape(), vision_stage=vision, **rest))
    try:
        yield cluster, vision
    finally:
        vision.close()
        cluster.close()


def submit(
    cluster: NodeCluster, parts: tuple[Part, ...], max_tokens: int = 6, filler: int = 0, **rest: Any
) -> Call:
    ids, spans = prompt_of(parts, filler)
    return cluster.submit(ids, max_tokens, images=spans, **rest)


@pytest.mark.parametrize(
    ("chunk", "graphs"),
    [(1, "breakable"), (3, "breakable"), (TOKENS, "breakable"), (7, "piecewise"), (32, "breakable")],
)
def test_any_chunks_of_mixed_batches_give_the_tokens_of_the_eager_target(chunk: int, graphs: str) -> None:
    """Text only, images first, inside, last, and several images replay in the same forwards (row C5)."""
    with image_cluster(chunk_tokens=chunk, prompt_graphs=graphs) as (cluster, vision):
        vision.send(1, 2, 3, 4, 5)
        calls = [(parts, submit(cluster, parts)) for parts in ALL]
        cluster.run()
        for parts, call in calls:
            assert call.error is None
            assert call.ids == greedy(parts, 6), parts
        cluster.settle()
        (target, *_) = cluster.prefill.link.counters.graphs
        assert target.replays > 0
        assert not target.fallbacks, "embeddings go through the slot: nothing is eager"


def test_refused_image_messages_are_reported_to_the_router() -> None:
    with image_cluster() as (cluster, vision):
        assert vision.sockets[0].send(b"p/images", b"no message")
        cluster.run(until=lambda: vision.intakes[0].refused_messages == 1)
        cluster.turn()
        assert cluster.prefill.link.counters.refused_messages == 1


def test_text_never_reads_what_images_left_in_the_slot() -> None:
    """A text-only batch on a multimodal model replays the same graph with its own rows."""
    with image_cluster() as (cluster, vision):
        vision.send(1)
        for parts in (FIRST, TEXT, FIRST, TEXT[:3]):
            call = submit(cluster, parts)
            cluster.run()
            assert call.ids == greedy(parts, 6)


@pytest.mark.parametrize("filler", [0, 6, VOCAB - 1])
def test_ids_at_placeholders_are_never_embedded(filler: int) -> None:
    with image_cluster(chunk_tokens=3) as (cluster, vision):
        vision.send(2, 4, 5)
        calls = [(parts, submit(cluster, parts, filler=filler)) for parts in (MIDDLE, TWO)]
        cluster.run()
        for parts, call in calls:
            assert call.ids == greedy(parts, 6)


@pytest.mark.parametrize(
    ("name", "chunk", "buckets", "graphs"),
    [
        ("eagle3", 1, (), "breakable"),
        ("eagle3", 3, (1, 4), "breakable"),
        ("eagle3", 3, (), "none"),
        ("eagle3", TOKENS, (), "breakable"),
        ("eagle3", 64, (1, 4), "breakable"),
        ("eagle3-full-vocabulary", 3, (), "breakable"),
        ("eagle", 3, (), "breakable"),
        ("eagle", 64, (1, 4), "breakable"),
        ("mtp-one-module", 3, (1, 4), "breakable"),
    ],
)
def test_drafts_read_the_images(name: str, chunk: int, buckets: tuple[int, ...], graphs: str) -> None:
    """The draft's prefill takes the target's merged embeddings, rotated left (rows C1 to C4).

    Across a chunk border the next prompt token may be a row of an image, and no placeholder is embedded.
    """
    prompts, noted = Prompts(*ALL), Seen()
    draft, step = observed_vision(name, 3, 0.7, prompts, noted, buckets)
    with image_cluster(chunk_tokens=chunk, draft=draft, step=step, prompt_graphs=graphs) as (cluster, vision):
        vision.send(1, 2, 3, 4, 5)
        calls = [(parts, submit(cluster, parts, 9)) for parts in ALL]
        cluster.run()
        for parts, call in calls:
            assert call.ids == greedy(parts, 9), parts
        cluster.settle()
        assert cluster.decode.link.counters.avg_spec_accept_length > 1.5
    assert len(noted) >= 10
    for parts, told, drafts in noted:
        assert drafts == eager_drafts(name, parts, told, 3)[: len(drafts)], (parts, told)


def test_accept_length_equals_that_of_the_eager_loop() -> None:
    """C4: the head's own drafts are used, so some of them are wrong."""
    prompts, noted = Prompts(*ALL), Seen()
    draft, step = observed_vision("eagle3-full-vocabulary", 3, 0.0, prompts, noted)
    with image_cluster(chunk_tokens=4, draft=draft, step=step) as (cluster, vision):
        vision.send(1, 2, 3, 4, 5)
        for parts in ALL:
            submit(cluster, parts, 12)
        cluster.run()
        cluster.settle()
        measured = cluster.decode.link.counters.avg_spec_accept_length
    emitted = rounds = 0
    for parts in ALL:
        answer, told = greedy(parts, 12), 1
        while told < 12:
            drafts = eager_drafts("eagle3-full-vocabulary", parts, answer[:told], 3)
            agreed = [draft == right for draft, right in zip(drafts, answer[told:])]
            accepted = agreed.index(False) if False in agreed else len(agreed)
            step_tokens = min(accepted + 1, 12 - told)
            emitted, rounds, told = emitted + step_tokens, rounds + 1, told + step_tokens
    assert measured == pytest.approx(emitted / rounds)


@pytest.mark.parametrize("draft_name", ["none", "eagle3"])
@pytest.mark.parametrize("page_size", [1, 4])
def test_prefix_hits_by_content(page_size: int, draft_name: str) -> None:
    """On both nodes the same text with another image hits only the text before it, and the same image hits fully."""
    one: tuple[Part, ...] = (1, 2, 3, 4, (1,), 5, 6, 7, 8, 9)
    other: tuple[Part, ...] = (1, 2, 3, 4, (2,), 5, 6, 7, 8, 9)
    rest: dict[str, Any] = {}
    if draft_name != "none":
        rest["draft"], rest["step"] = observed_vision(draft_name, 2, 0.5, Prompts(one, other), [])
    with image_cluster(page_size=page_size, **rest) as (cluster, vision):
        vision.send(1, 2)
        cached = []
        for parts in (one, other, one, other):
            call = submit(cluster, parts)
            cluster.run()
            assert call.ids == greedy(parts, 6)
            assert call.cached_tokens is not None
            cached.append(call.cached_tokens)
            cluster.settle()
        assert cached[0] == 0
        assert 4 - page_size <= cached[1] <= 4, "only the text before the image is shared"
        assert cached[2] == cached[3] >= 9, "a repeated prompt hits past its image"
        # a prefix hit encodes nothing again, and rows are shared by content
        assert vision.embeds[0].encoded == 2


def test_salts_share_neither_pages_nor_embeddings() -> None:
    """A tenant cannot find out which images another one has sent."""
    parts: tuple[Part, ...] = (1, 2, 3, 4, (1,), 5, 6, 7, 8, 9)
    with image_cluster(page_size=1) as (cluster, vision):
        cached = []
        for salt in (b"one", b"other", b"", b"one", b"other", b""):
            vision.send(1, salt=salt)
            ids, spans = prompt_of(parts, 0)
            salted = tuple(structs.replace(span, digest=salted_digest(span.digest, salt)) for span in spans)
            call = cluster.submit(ids, 6, images=salted, salt=salt)
            cluster.run()
            assert call.ids == greedy(parts, 6)
            assert call.cached_tokens is not None
            cached.append(call.cached_tokens)
            cluster.settle()
        assert cached[:3] == [0, 0, 0]
        assert cached[3] == cached[4] == cached[5] == len(ids) - 1
        assert vision.embeds[0].encoded == 3


def test_the_encoder_runs_before_serving_where_there_is_one() -> None:
    """All batch sizes of its family run, and no data of them stays."""
    with image_cluster() as (_, vision):
        embeds = vision.embeds[0]
        assert embeds.warm_up() == 2
        assert vision.parts[0].forwards == [1, 2]
        assert embeds.encoded == len(vision.caches[0]) == 0
    assert TextEmbeds().warm_up() == 0


def test_a_continued_prompt_keeps_no_image_rows_that_it_has_read() -> None:
    """Otherwise prompts in flight would hold device memory in addition to the cache, and only the cache is counted."""
    with image_cluster(cache_bytes=0, chunk_tokens=3) as (cluster, vision):
        vision.send(4, 5)
        call = submit(cluster, TWO)
        request = None
        kept: set[tuple[int, int]] = set()
        for _ in range(500):
            cluster.turn()
            request = next(iter(cluster.prefill.node.queues.computing.values()), request)
            held = [each for each in vision.prompts[0] if each.rows is not None]
            if request is not None:
                kept.add((request.scheduled, len(held)))
                assert all(each.span.end > request.scheduled for each in held)
                assert all(each.ready for each in vision.prompts[0]), "no image is waited for again"
            if call.over:
                break
        assert max(count for _, count in kept) == 1
        assert call.ids == greedy(TWO, 6)
        cluster.settle()


def test_a_hit_that_holds_the_whole_image_needs_no_encoder() -> None:
    # No rows are cached: a repeated encoding is counted.
    with image_cluster(cache_bytes=0, page_size=1) as (cluster, vision):
        vision.send(1)
        for parts in ((1, (1,), 2, 3), (1, (1,), 2, 4)):
            submit(cluster, parts)
            cluster.run()
        assert vision.embeds[0].encoded == 1


def test_images_of_several_prompts_are_encoded_in_one_batch() -> None:
    with image_cluster() as (cluster, vision):
        vision.send(1, 2, 3, 4, 5)
        cluster.turn(3)
        assert len(vision.intakes[0].held) == 5
        for parts in (FIRST, LAST, TWO):
            submit(cluster, parts, legs="p")
        cluster.turn(4)
        assert vision.parts[0].forwards == [4], "each image once, all in one forward"


def test_a_prompt_waits_for_its_images_and_others_pass() -> None:
    with image_cluster() as (cluster, vision):
        late = submit(cluster, MIDDLE)
        text = submit(cluster, TEXT)
        cluster.run(lambda: text.over)
        assert not late.ids
        vision.send(2)
        cluster.run()
        assert late.ids == greedy(MIDDLE, 6)


def test_images_that_never_come_end_the_wait() -> None:
    with image_cluster() as (cluster, _):
        late = submit(cluster, MIDDLE)
        cluster.resubmit = False
        cluster.run(limit=200, dt=ARRIVAL_SECONDS / 50)
        assert late.error is not None
        assert late.error.code == "transfer_failed", "the router places it again, with its images"
        cluster.settle()


def test_images_that_wait_for_a_decoder_have_come() -> None:
    """Waiting for a decoder is not limited by ARRIVAL_SECONDS; the request's own deadline still applies."""
    held, pace = threading.Event(), ARRIVAL_SECONDS / 50

    def reader(data: bytes) -> Pixels:
        assert held.wait(PATIENCE)
        return read(data)

    with image_cluster(reader=reader, make_intake=ImageIntake) as (cluster, vision), ExitStack() as at_end:
        at_end.callback(held.set)
        vision.send(2)
        slow, never = submit(cluster, MIDDLE), submit(cluster, FIRST)
        cluster.resubmit = False
        cluster.run(lambda: never.over, limit=200, dt=pace)
        assert never.error is not None
        assert slow.error is None
        held.set()
        until(lambda: not vision.intakes[0].busy)
        cluster.run()
        assert slow.ids == greedy(MIDDLE, 6)


def test_a_broken_image_ends_only_its_own_prompt() -> None:
    with image_cluster() as (cluster, vision):
        vision.send(1, -1)
        broken, whole = submit(cluster, (1, (-1,), 2)), submit(cluster, FIRST)
        cluster.run()
        assert broken.error is not None
        assert broken.error.code == "invalid_value"
        assert whole.ids == greedy(FIRST, 6)
        cluster.settle()


@pytest.mark.parametrize(
    "spans",
    [
        (ImageSpan(6, TOKENS, digest_of(1)),),
        (ImageSpan(0, TOKENS, digest_of(1)), ImageSpan(TOKENS - 1, TOKENS, digest_of(2))),
        (ImageSpan(0, TOKENS, digest_of(1), 2),),
        (ImageSpan(0, TOKENS + 1, digest_of(1)),),
        (ImageSpan(0, TOKENS, digest_of(1), TOKENS),),
    ],
)
def test_spans_that_do_not_fit_are_refused_by_both_nodes(spans: tuple[ImageSpan, ...]) -> None:
    with image_cluster() as (cluster, vision):
        vision.send(1)
        call = cluster.submit([1] * 10, 2, images=spans, legs="p")
        cluster.run()
        assert call.error is not None
        assert call.error.code == "invalid_value"
        # Only the prefill node knows an image's size.
        if spans[0].length == TOKENS and spans[0].rows < TOKENS:
            call = cluster.submit([1] * 10, 2, images=spans, legs="d")
            cluster.run()
            assert call.error is not None
            assert call.error.code == "invalid_value"


def test_a_text_only_model_refuses_images() -> None:
    NoImages().check((), ())
    with pytest.raises(InvalidRequest, match="does not accept images"):
        NoImages().check((ImageSpan(0, 1, bytes(32)),), ())
    with NodeCluster() as cluster:
        call = submit(cluster, FIRST, legs="p")
        cluster.run()
        assert call.error is not None
        assert call.error.code == "invalid_value"


def test_a_draft_that_reads_only_ids_raises() -> None:
    """A7: it raises ValueError rather than asserting; start-up already refuses it (test_llava.py)."""
    draft = ModelPrefill(lambda batch: pytest.fail("must not run"))
    merged = MergedEmbeds(torch.zeros(1, 1), (), (), lambda ids: ids)
    with pytest.raises(ValueError, match="cannot use image embeddings"):
        draft.extend((), None, None, None, merged)  # type: ignore[arg-type]
    assert TextEmbeds()((), None) is None  # type: ignore[arg-type]
    assert StandaloneModel().config.vision is None
