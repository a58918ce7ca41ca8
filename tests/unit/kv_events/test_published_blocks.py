"""What the caches of a node take and give up, as KV events: a subscriber knows what can be found, and no more."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import numpy as np
import pytest

from common.kv_cache.block_hashes import chain_start, token_bytes
from common.kv_cache.image_keys import with_images
from common.kv_cache.page_space import PageSpace, contents_of, keys_with_lookahead
from common.kv_cache.radix_cache import Keys, RadixCache
from common.kv_events.published_blocks import Adopted, CacheChange, Evicted, PublishedBlocks
from common.kv_events.wire import (
    CPU,
    GPU,
    AllBlocksCleared,
    Batch,
    BlockRemoved,
    BlockStored,
    Event,
    decode,
    encode,
)
from common.messages.generation import ImageSpan

SALTS = [b"", b"tenant"]


class Tap:
    """Notes changes as `CacheTap` does, without a thread."""

    def __init__(self, page_tokens: int, lookahead: int, changes: list[CacheChange]) -> None:
        self._page_tokens = page_tokens
        self._lookahead = lookahead
        self._changes = changes

    def adopted(self, keys: Keys, pages: Sequence[int], first: int, salt: bytes) -> None:
        tokens = contents_of(keys, self._lookahead).astype("<i4").tobytes()
        self._changes.append(
            Adopted(GPU, self._page_tokens, salt, tokens, len(tokens) // 4, first, tuple(pages))
        )

    def evicted(self, pages: Sequence[int]) -> None:
        self._changes.append(Evicted(GPU, tuple(pages)))


class Subscriber:
    """Follows events, and complains about those that contradict earlier ones."""

    def __init__(self) -> None:
        self.held: dict[str | None, set[int]] = {}

    def hear(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self.held.clear()
                continue
            held = self.held.setdefault(event.medium, set())
            hashes = {int(each) for each in event.block_hashes if isinstance(each, int)}
            assert len(hashes) == len(event.block_hashes), "a hash twice, or no integer"
            if isinstance(event, BlockRemoved):
                assert hashes <= held, "a block is removed that was not stored"
                held -= hashes
            else:
                assert event.parent_block_hash is None or event.parent_block_hash in held, "no parent"
                assert not hashes & held, "a block is stored twice"
                held |= hashes


def adopted(
    tokens: Sequence[int], pages: Sequence[int], first: int = 0, salt: bytes = b"", medium: str = GPU
) -> Adopted:
    return Adopted(medium, 2, salt, token_bytes(tokens), len(tokens), first, tuple(pages))


def hashes(tokens: Sequence[int], size: int, salt: bytes = b"") -> tuple[int, ...]:
    return chain_start(salt).extended(token_bytes(tokens), size).hashes


def test_a_block_is_stored_with_the_page_in_which_it_ends() -> None:
    blocks, prompt = PublishedBlocks(4, token_ids=True), list(range(10))
    first, second = hashes(prompt, 4)
    assert blocks.apply(adopted(prompt[:2], [7])) == []
    assert blocks.apply(adopted(prompt[:4], [8], first=1)) == [
        BlockStored((first,), None, [0, 1, 2, 3], 4, None, GPU, None)
    ]
    assert blocks.apply(adopted(prompt, [5, 6, 9], first=2)) == [
        BlockStored((second,), first, [4, 5, 6, 7], 4, None, GPU, None)
    ]
    assert blocks.apply(Evicted(GPU, (9,))) == []
    assert blocks.apply(Evicted(GPU, (6,))) == [BlockRemoved([second], GPU)]
    assert blocks.apply(Evicted(GPU, (5, 8))) == [BlockRemoved([first], GPU), AllBlocksCleared()]


def test_several_blocks_may_end_in_one_page() -> None:
    blocks, prompt = PublishedBlocks(2, token_ids=False), list(range(8))
    change = Adopted(CPU, 4, b"", token_bytes(prompt), len(prompt), 1, (3,))
    _, two, three, four = hashes(prompt, 2)
    assert blocks.apply(change) == [BlockStored((three, four), two, (), 2, None, CPU, None)]
    assert blocks.apply(Evicted(CPU, (3,))) == [BlockRemoved([three, four], CPU), AllBlocksCleared()]


def test_each_medium_has_its_own_blocks() -> None:
    blocks, prompt = PublishedBlocks(2, token_ids=False), [1, 2]
    (block,) = hashes(prompt, 2)
    blocks.apply(adopted(prompt, [1]))
    assert blocks.apply(adopted(prompt, [1], medium=CPU)) == [
        BlockStored((block,), None, (), 2, None, CPU, None)
    ]
    assert blocks.apply(Evicted(GPU, (1,))) == [BlockRemoved([block], GPU)]
    assert blocks.apply(Evicted(CPU, (1,))) == [BlockRemoved([block], CPU), AllBlocksCleared()]


def test_events_have_neither_the_salt_nor_the_tokens_of_a_prompt_that_has_one() -> None:
    blocks, prompt = PublishedBlocks(2, token_ids=True), [11, 12, 13, 14]
    (event,) = blocks.apply(adopted(prompt, [1, 2], salt=b"a secret"))
    assert event == BlockStored(hashes(prompt, 2, b"a secret"), None, (), 2, None, GPU, None)
    assert set(hashes(prompt, 2)).isdisjoint(hashes(prompt, 2, b"a secret"))
    (plain,) = blocks.apply(adopted(prompt, [3, 4]))
    assert isinstance(plain, BlockStored)
    assert plain.token_ids == prompt


def test_tokens_are_left_out_on_request_and_for_images() -> None:
    quiet = PublishedBlocks(2, token_ids=False)
    (event,) = quiet.apply(adopted([1, 2], [1]))
    assert isinstance(event, BlockStored)
    assert not event.token_ids


def test_blocks_before_the_first_image_have_their_tokens() -> None:
    """A reader that hashes tokens itself finds a prompt without images that begins like one with images."""
    blocks, prompt = PublishedBlocks(2, token_ids=True), [1, 2, 3, 9, 5, 6]
    before, after = blocks.apply(Adopted(GPU, 2, b"", token_bytes(prompt), 3, 0, (1, 2, 3)))
    one, two, three = hashes(prompt, 2)
    assert before == BlockStored((one,), None, [1, 2], 2, None, GPU, None)
    assert after == BlockStored((two, three), one, (), 2, None, GPU, None)
    (text,) = blocks.apply(adopted([1, 2, 7, 8], [4, 5]))
    assert text == BlockStored(hashes([1, 2, 7, 8], 2)[1:], one, [7, 8], 2, None, GPU, None)


@pytest.mark.parametrize("lookahead", [0, 2])
def test_blocks_with_images_have_the_hashes_that_a_router_computes(lookahead: int) -> None:
    image = ImageSpan(offset=3, length=4, digest=b"d" * 32, rows=2)
    tokens = [*range(3), 9, 9, 9, 9, *range(7)]
    keys = keys_with_lookahead(lookahead)(with_images(tokens, [image]))
    read = contents_of(keys, lookahead).astype("<i4").tobytes()
    assert read == token_bytes(tokens, [image])[: len(read)]
    assert len(read) == 4 * (len(tokens) - lookahead)


def test_pairs_of_tokens_can_be_taken_apart_up_to_the_first_image() -> None:
    image = ImageSpan(offset=3, length=2, digest=b"d" * 32, rows=1)
    pairs = keys_with_lookahead(1)(with_images([5, 6, 7, 0, 0, 8], [image]))
    assert contents_of(pairs, 1).tolist() == [5, 6]
    assert contents_of(keys_with_lookahead(1)(np.arange(5)), 1).tolist() == [0, 1, 2, 3]


def test_a_page_that_is_used_again_was_given_up_although_that_was_not_heard() -> None:
    blocks = PublishedBlocks(2, token_ids=False)
    blocks.apply(adopted([1, 2], [1]))
    removed, stored = blocks.apply(adopted([3, 4], [1]))
    assert removed == BlockRemoved([*hashes([1, 2], 2)], GPU)
    assert isinstance(stored, BlockStored)
    assert len(blocks) == 1


def test_long_prompts_are_told_in_several_events() -> None:
    blocks, prompt, pauses = PublishedBlocks(1, token_ids=True), list(range(150)), list[None]()
    events = blocks.apply(Adopted(GPU, 1, b"", token_bytes(prompt), 150, 0, tuple(range(1, 151))))
    assert [len(event.token_ids) for event in events if isinstance(event, BlockStored)] == [64, 64, 22]
    subscriber = Subscriber()
    subscriber.hear(events)
    late = Subscriber()
    late.hear(blocks.snapshot())
    assert late.held == subscriber.held
    written = encode(Batch(1.0, events, 0), lambda: pauses.append(None))
    assert encode(decode(written, tokens=True)) == written
    assert len(pauses) == len(events)


@pytest.mark.parametrize(("page_tokens", "block_tokens"), [(2, 4), (4, 2), (3, 4), (1, 1)])
@pytest.mark.parametrize("lookahead", [0, 1, 2])
def test_a_subscriber_knows_what_can_be_found(page_tokens: int, block_tokens: int, lookahead: int) -> None:
    rng = Random(page_tokens * 100 + block_tokens * 10 + lookahead)
    changes: list[CacheChange] = []
    cache = RadixCache(page_tokens, observer=Tap(page_tokens, lookahead, changes))
    space = PageSpace(page_tokens, 30, cache, keys_with_lookahead(lookahead))
    blocks, subscriber = PublishedBlocks(block_tokens, token_ids=True), Subscriber()
    for _ in range(200):
        prompt = [rng.randrange(2) for _ in range(rng.randrange(1, 30))]
        salt, keys = rng.choice(SALTS), space.keys(prompt)
        lease = space.lease(keys, space.pages_for(len(prompt)), len(keys), salt)
        if lease is not None:
            lease.commit(keys)
            lease.release()
        if rng.random() < 0.05:
            space.flush()
        for change in changes:
            subscriber.hear(blocks.apply(change))
        changes.clear()
        match = cache.match(keys, salt)
        found = len(match.pages) * page_tokens // block_tokens
        expected = hashes(prompt, block_tokens, salt)
        held = subscriber.held.get(GPU, set())
        # With lookahead, another prompt may hold the last blocks together with other tokens after them.
        assert held.issuperset(expected[:found])
        assert lookahead or not held & set(
            expected[found : len(keys) // page_tokens * page_tokens // block_tokens]
        )
    late = Subscriber()
    late.hear(blocks.snapshot())
    assert late.held == {medium: held for medium, held in subscriber.held.items() if held}
    space.flush()
    for change in changes:
        subscriber.hear(blocks.apply(change))
    assert not subscriber.held
