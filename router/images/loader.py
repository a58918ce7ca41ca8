"""Loads the images of a chat request: from content parts to verified bytes, under limits, off the event loop."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Protocol

from common.checkpoint.vision_config import VisionConfig
from common.errors import InvalidRequest, Overloaded, RequestError
from common.image_files import MEDIA_TYPES
from router.requests.image_parts import image_parts
from router.requests.openai_schema import Message

PIECE = 1 << 18  # characters, a multiple of 4
_DATA_URL = re.compile(r"data:([a-z0-9/+.-]*)((?:;[a-z0-9=+.-]+)*?)(;base64)?,", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Image:
    """One image that is known to decode."""

    data: bytes
    digest: bytes  # SHA-256 of data
    rows: int  # in its grid of tokens
    columns: int


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """Limits from the router section of the config."""

    max_count: int
    max_bytes: int
    max_request_bytes: int
    max_held_bytes: int


class Inspect(Protocol):
    async def check(self, data: bytes, media_type: str | None) -> tuple[int, int]:
        """Return (width, height) in pixels. Raises InvalidRequest."""
        ...

    async def close(self) -> None: ...


class Fetch(Protocol):
    async def fetch(self, address: str) -> bytes:
        """Return the image at `address`. Raises InvalidRequest or Overloaded."""
        ...

    async def close(self) -> None: ...


class ImageLoader(Protocol):
    """The image loader that the chat route uses."""

    async def load(self, messages: Sequence[Message]) -> tuple[Image, ...]:
        """Return the images of all messages in order. Raises InvalidRequest."""
        ...

    def hold(self, images: Sequence[Image]) -> AbstractContextManager[None]: ...

    async def close(self) -> None: ...


class RefusingImageLoader:
    """The loader of a text-only model: it refuses every image."""

    async def load(self, messages: Sequence[Message]) -> tuple[Image, ...]:
        for where, _ in image_parts(messages):
            raise InvalidRequest(f"{where}: this model does not accept images", param=where)
        return ()

    def hold(self, images: Sequence[Image]) -> AbstractContextManager[None]:
        return nullcontext()

    async def close(self) -> None:
        """Do nothing: the loader holds no resources."""


class VerifyingImageLoader:
    """Loads and verifies images. Every refusal names the part: messages[i].content[j].image_url."""

    def __init__(self, limits: ImageLimits, vision: VisionConfig, inspector: Inspect, fetcher: Fetch) -> None:
        self._limits = limits
        self._vision = vision
        self._inspector = inspector
        self._fetcher = fetcher
        self._held = 0

    @property
    def held_bytes(self) -> int:
        """Bytes of images that all requests in flight hold."""
        return self._held

    async def load(self, messages: Sequence[Message]) -> tuple[Image, ...]:
        """Return the images of all messages in order.

        Raises InvalidRequest, or Overloaded if too many bytes are held.
        """
        parts = list(image_parts(messages))
        if len(parts) > self._limits.max_count:
            raise InvalidRequest(
                f"{len(parts)} images in one request, at most {self._limits.max_count}", param=parts[-1][0]
            )
        images: list[Image] = []
        left = self._limits.max_request_bytes
        # Counted already now: the requests may wait long for the inspector.
        with self._counted(sum(len(address) for _, address in parts)):
            for where, address in parts:
                try:
                    image = await self._one(address, left)
                except RequestError as error:
                    raise type(error)(f"{where}: {error}", param=where) from error
                left -= len(image.data)
                images.append(image)
        return tuple(images)

    def hold(self, images: Sequence[Image]) -> AbstractContextManager[None]:
        """Count the images of a request while it may be placed again. Raises Overloaded if too many bytes are held."""
        return self._counted(sum(len(image.data) for image in images))

    @contextmanager
    def _counted(self, size: int) -> Iterator[None]:
        if size and self._held and self._held + size > self._limits.max_held_bytes:
            raise Overloaded("the images of other requests fill the router's memory; try again later")
        self._held += size
        try:
            yield
        finally:
            self._held -= size

    async def close(self) -> None:
        """End the processes that decode and fetch images."""
        await self._inspector.close()
        await self._fetcher.close()

    async def _one(self, address: str, left: int) -> Image:
        media_type: str | None = None
        most = min(self._limits.max_bytes, left)
        if address[:5].lower() == "data:":
            media_type, data = await asyncio.to_thread(_from_data_url, address, self._limits.max_bytes)
        else:
            data = await self._fetcher.fetch(address)
        if len(data) > most:
            raise InvalidRequest(
                f"the images of a request may have at most {self._limits.max_request_bytes} bytes in total"
            )
        size = await self._inspector.check(data, media_type)
        rows, columns = self._vision.grid(*size)
        digest = await asyncio.to_thread(lambda: hashlib.sha256(data).digest())
        return Image(data, digest, rows, columns)


def _from_data_url(address: str, max_bytes: int) -> tuple[str, bytes]:
    """Return (media type, bytes) of a data: URL."""
    found = _DATA_URL.match(address[:256])
    if found is None or not found[3]:
        raise InvalidRequest("a data: URL of an image looks like data:image/png;base64,...")
    media_type = found[1].lower().replace("image/jpg", "image/jpeg")
    if media_type not in MEDIA_TYPES.values():
        raise InvalidRequest(
            f"images of type {found[1]!r} are not supported; send {', '.join(MEDIA_TYPES.values())}"
        )
    if (len(address) - found.end()) * 3 // 4 > max_bytes + 2:
        raise InvalidRequest(f"the image is larger than {max_bytes} bytes")
    data = from_base64(address, found.end())
    if len(data) > max_bytes:
        raise InvalidRequest(f"the image is larger than {max_bytes} bytes")
    return media_type, data


def from_base64(text: str, start: int) -> bytes:
    """Decode `text[start:]` in pieces: each piece holds the GIL, and the event loop waits for it."""
    data = bytearray()
    try:
        if text.find("=", start, -2) >= 0:  # at the end of a piece it would count as valid padding
            raise ValueError("padding in the middle")
        for at in range(start, len(text), PIECE):
            data += base64.b64decode(text[at : at + PIECE], validate=True)
    except ValueError as error:  # binascii.Error is a ValueError
        raise InvalidRequest("the image is not valid base64") from error
    return bytes(data)
