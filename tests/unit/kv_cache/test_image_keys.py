"""Keys of images in the prefix cache follow from content and row, and differ from all keys of token ids."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import InvalidRequest
from common.kv_cache.image_keys import IMAGE_BIT, image_keys, paired, with_images
from common.kv_cache.page_space import as_bigram_keys
from common.messages.generation import ImageSpan

DIGESTS = st.binary(min_size=32, max_size=32)


@given(DIGESTS, DIGESTS, st.integers(1, 40))
def test_rows_of_an_image_have_keys_of_its_content(one: bytes, other: bytes, length: int) -> None:
    first = image_keys(ImageSpan(0, length, one))
    assert np.array_equal(first, image_keys(ImageSpan(7, length, one))), (
        "keys do not depend on where the image is"
    )
    assert np.all(first >= IMAGE_BIT)
    assert len(set(first.tolist())) == length, "rows of one image have different keys"
    if one != other:
        assert not np.any(first == image_keys(ImageSpan(0, length, other)))


def test_spans_take_the_place_of_ids_and_nothing_else() -> None:
    ids = [1, 2, 6, 6, 3, 6, 6, 4]
    spans = [ImageSpan(2, 2, b"a" * 32), ImageSpan(5, 2, b"b" * 32)]
    keys = with_images(ids, spans)
    assert keys[[0, 1, 4, 7]].tolist() == [1, 2, 3, 4]
    assert ids == [1, 2, 6, 6, 3, 6, 6, 4], "the ids are not changed: the batch embeds them"
    assert np.array_equal(keys[2:4], image_keys(spans[0]))
    assert np.array_equal(with_images([0] * 8, spans)[2:4], keys[2:4]), (
        "keys do not depend on the ids at the placeholders"
    )
    for bad in ([ImageSpan(7, 2, b"a" * 32)], [spans[1], spans[0]], [spans[0], ImageSpan(3, 1, b"c" * 32)]):
        with pytest.raises(InvalidRequest, match="overlap or extend past"):
            with_images(ids, bad)


@given(st.lists(st.integers(0, 200_000), min_size=2, max_size=30), DIGESTS)
def test_pairs_with_image_rows_are_like_no_pair_of_tokens(ids: list[int], digest: bytes) -> None:
    """With a draft that shares the pages a key covers two positions: keys of text are unchanged."""
    text = np.asarray(ids, dtype=np.int64)
    assert np.array_equal(as_bigram_keys(text), (text[:-1] << 32) | text[1:])
    whole = with_images([*ids, 0, 0, 0, *ids], [ImageSpan(len(ids), 3, digest)])
    keys = as_bigram_keys(whole)
    around = keys[len(ids) - 1 : len(ids) + 3]  # text and image, image and image twice, image and text
    assert np.all(around < 0)
    assert len(set(around.tolist())) == 4
    assert np.array_equal(keys[: len(ids) - 1], as_bigram_keys(text))


def test_pairs_depend_on_both_and_on_their_order() -> None:
    a, b = image_keys(ImageSpan(0, 64, b"a" * 32)), image_keys(ImageSpan(0, 64, b"b" * 32))
    made = {key for first in (a, b) for second in (a, b) for key in paired(first, second).tolist()}
    assert len(made) == 4 * 64
