"""What a prefill node is sent beside its control link: images, on a socket of their own, so that nothing waits behind
them."""

from __future__ import annotations

import hashlib
from typing import Annotated

import msgspec

from common.messages.generation import CacheSalt
from common.messages.wire import InboxCodec

MAX_IMAGE_BYTES = 15 << 20  # of one image as its client sent it; a message holds 16 MiB
LINK = "images"  # last part of that socket's routing id


class ImageData(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """One image of a prompt that is on its way too, sooner or later."""

    digest: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]  # as ImageSpan names it
    data: Annotated[bytes, msgspec.Meta(min_length=1, max_length=MAX_IMAGE_BYTES)]  # PNG, JPEG, WebP or GIF
    salt: CacheSalt = b""  # of the prompt, see `salted_digest`


def salted_digest(sha256: bytes, salt: bytes) -> bytes:
    """What names an image in prompts and caches: its content, within one salt. `sha256` is that of its bytes."""
    return hashlib.sha256(salt + sha256).digest() if salt else sha256


codec: InboxCodec[ImageData] = InboxCodec(ImageData, "image inbox")
