"""Images in radix keys: content-based keys replace placeholder ids, so that pages are shared by content.

The same text with another image never matches, with the same image it does. The key of an image row is 62 bits of its
content's hash and one bit above them that no token id has; nobody can choose an image whose rows collide with
another's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from common.errors import InvalidRequest
from common.kv_cache.radix_cache import Keys
from common.messages.generation import ImageSpan

IMAGE_BIT = 1 << 62  # set in every key of an image row


def with_images(token_ids: Sequence[int] | Keys, images: Sequence[ImageSpan]) -> Keys:
    """Return [n] int64: token ids, and keys of image rows in place of images.

    Raises InvalidRequest for invalid spans.
    """
    keys = np.array(token_ids, dtype=np.int64)  # a copy, since the batch embeds token ids everywhere
    end = 0
    for image in images:
        if image.offset < end or image.offset + image.length > len(keys):
            raise InvalidRequest("images overlap or extend past the end of the prompt", param="messages")
        if image.length % image.rows:
            raise InvalidRequest(
                f"an image of {image.length} tokens does not have {image.rows} rows", param="messages"
            )
        end = image.offset + image.length
        keys[image.offset : end] = image_keys(image)
    return keys


def image_keys(image: ImageSpan) -> Keys:
    """Return [length] int64 keys, by digest and row."""
    rows = np.frombuffer(hashlib.shake_256(image.digest).digest(8 * image.length), dtype="<i8")
    return rows & (IMAGE_BIT - 1) | IMAGE_BIT


def paired(first: Keys, second: Keys) -> Keys:
    """Return one key per pair if at least one is an image row: negative, so it differs from any pair of token ids."""
    mixed = first.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) ^ second.astype(np.uint64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):  # splitmix64's finalizer
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return (mixed >> np.uint64(1)).astype(np.int64) | np.iinfo(np.int64).min
