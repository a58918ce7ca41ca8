"""Hashes of the blocks of prompts, which routers and nodes compute alike."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from common.kv_cache.block_hashes import chain_start, token_bytes
from common.messages.generation import ImageSpan

TOKENS = list(range(1, 41))


def hashes(tokens: list[int], salt: bytes = b"", block: int = 8) -> tuple[int, ...]:
    return chain_start(salt).extended(token_bytes(tokens), block).hashes


def test_only_whole_blocks_count() -> None:
    assert [len(hashes(TOKENS[:length])) for length in (0, 7, 8, 15, 16, 40)] == [0, 0, 1, 1, 2, 5]


def test_the_values_never_change() -> None:
    """A router that reads another process's hashes relies on them."""
    assert hashes(TOKENS[:16]) == (14305242838359491558, 4315443064711976679)


@given(st.lists(st.integers(0, 200_000), max_size=40), st.integers(0, 39), st.integers(1, 9))
def test_a_change_shows_from_its_block_on(tokens: list[int], place: int, block: int) -> None:
    changed = [token + (index == place) for index, token in enumerate(tokens)]
    ours, theirs = hashes(tokens, block=block), hashes(changed, block=block)
    assert [a == b for a, b in zip(ours, theirs, strict=True)] == [
        number < place // block or place >= len(tokens) for number in range(len(ours))
    ]


def test_salts_have_nothing_in_common() -> None:
    assert not set(hashes(TOKENS)) & set(hashes(TOKENS, b"a"))
    assert not set(hashes(TOKENS, b"b")) & set(hashes(TOKENS, b"a"))


@given(st.integers(0, 40))
def test_a_chain_can_be_continued(cut: int) -> None:
    first = chain_start(b"s").extended(token_bytes(TOKENS[:cut]), 8)
    whole = len(first.hashes) * 8
    assert first.extended(token_bytes(TOKENS[whole:]), 8).hashes == hashes(TOKENS, b"s")


def test_images_count_by_their_contents() -> None:
    def with_image(digest: bytes) -> bytes:
        span = ImageSpan(offset=8, length=8, digest=digest)
        return token_bytes(TOKENS, [span])

    same, other = with_image(b"1" * 32), with_image(b"2" * 32)
    assert same == with_image(b"1" * 32)
    ours, theirs = (chain_start().extended(each, 8).hashes for each in (same, other))
    assert ours[0] == theirs[0] == hashes(TOKENS)[0]
    assert not set(ours[1:]) & set(theirs[1:])
