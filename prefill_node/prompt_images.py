"""The images of prompts that a worker keeps between forwards, from pixels to rows of embeddings."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import Tensor

from common.engine.models.vision_part import Pixels
from common.errors import InvalidRequest
from common.messages.generation import ImageSpan


@dataclass(slots=True, eq=False)
class PendingImage:
    """One image of one prompt. It is ready once it has pixels or rows."""

    span: ImageSpan
    pixels: Pixels | None = None
    rows: Tensor | None = None  # [span.length, H], on the device
    over: bool = False  # the prompt has read all of it, so its data is dropped

    @property
    def ready(self) -> bool:
        return self.over or self.pixels is not None or self.rows is not None

    def drop_after(self, position: int) -> None:
        """Drop the data once the prompt has been computed past the image. Shared rows stay in the cache."""
        if self.span.end <= position:
            self.over, self.rows, self.pixels = True, None, None

    def fits(self, rows: int, columns: int) -> None:
        """Raise InvalidRequest if an image of `rows` x `columns` tokens does not match its span in the prompt."""
        if (rows, columns) != (self.span.rows, self.span.columns):
            raise InvalidRequest(
                f"an image has {rows} x {columns} tokens, but its span in the prompt has {self.span.rows} x "
                f"{self.span.columns}",
                param="messages",
            )

    def take_cached(self, cache: RowCache) -> None:
        """Take the rows of the image if they are cached. Raises InvalidRequest if they do not fit."""
        rows = cache.get(self.span.digest)
        if rows is not None:
            self.fits(*rows.shape[:2])
            self.rows = rows.flatten(0, 1)


class PromptImages:
    """The images of every prompt whose last chunk has not started, by the prompt's key.

    The intake adds pixels and the worker reads them; pixels and rows are never part of a plan.
    """

    def __init__(self) -> None:
        self._kept: dict[int, tuple[PendingImage, ...]] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[PendingImage]:
        """Iterate over all images of all prompts."""
        return (image for images in self._kept.values() for image in images)

    def add(self, key: int, images: Iterable[PendingImage]) -> None:
        self._kept[key] = tuple(images)

    def of(self, key: int) -> tuple[PendingImage, ...]:
        """Return the images of one prompt; none if the prompt is unknown."""
        return self._kept.get(key, ())

    def forget(self, keys: Iterable[int]) -> None:
        """Drop the images of prompts. Unknown prompts are ignored."""
        for key in keys:
            self._kept.pop(key, None)


class RowCache:
    """Rows of images by content digest, with LRU eviction. Prompts keep the rows that they use alive."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._rows: OrderedDict[bytes, Tensor] = OrderedDict()  # [rows, columns, H]
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._rows)

    def get(self, digest: bytes) -> Tensor | None:
        found = self._rows.get(digest)
        if found is not None:
            self._rows.move_to_end(digest)
        return found

    def put(self, digest: bytes, rows: Tensor) -> None:
        if digest in self._rows:
            return
        self._rows[digest] = rows
        self.nbytes += rows.nbytes
        while self.nbytes > self._max_bytes:
            _, oldest = self._rows.popitem(last=False)
            self.nbytes -= oldest.nbytes
