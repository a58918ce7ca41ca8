"""Messages with images to a prefill node, on a socket of their own so that they do not delay control messages."""

from __future__ import annotations

import hashlib
from typing import Annotated

import msgspec

from common.messages.generation import CacheSalt
from common.messages.wire import InboxCodec

MAX_IMAGE_BYTES = 15 << 20  # per image as the client sent it; a message may have 16 MiB
LINK = "images"  # last part of this socket's routing id


class ImageData(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """One image of a prompt; the prompt arrives before or after it."""

    digest: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]  # as ImageSpan names it
    data: Annotated[bytes, msgspec.Meta(min_length=1, max_length=MAX_IMAGE_BYTES)]  # PNG, JPEG, WebP or GIF
    salt: CacheSalt = b""  # salt of the prompt, see `salted_digest`


def salted_digest(sha256: bytes, salt: bytes) -> bytes:
    """Return the name of an image in prompts and caches: its content within one salt. `sha256` hashes its bytes."""
    return hashlib.sha256(salt + sha256).digest() if salt else sha256


codec: InboxCodec[ImageData] = InboxCodec(ImageData, "image inbox")
