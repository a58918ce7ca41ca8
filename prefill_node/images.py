"""Images of prompts: bytes from the router are decoded by threads next to the main loop, then claimed by prompts.

An image and its prompt arrive on different sockets, in either order. Several prompts may contain the same image: it is
decoded once, and not at all if its rows are cached.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol
from weakref import WeakSet

import zmq
from torch import Tensor

from common.engine.models.vision_part import Pixels
from common.errors import InternalError, InvalidRequest, Overloaded, ProtocolError
from common.ipc import Dealer
from common.messages.generation import ImageSpan
from common.messages.image_inbox import ImageData, codec, salted_digest
from common.observability.logs import Log

MAX_WAITING = 512  # images of waiting prompts; their pixels are in host memory
MAX_WAITING_TOKENS = 1 << 19  # of those images; one token takes some kilobytes of pixels
UNCLAIMED = 256  # images kept although no prompt waits for them; the oldest are evicted
UNCLAIMED_BYTES = 1 << 30  # of their pixels
AT_ONCE = 4  # images received in one turn of the loop, each of which takes some milliseconds to copy
DECODERS = 2  # threads; Pillow releases the GIL while it decodes
ARRIVAL_SECONDS = 30.0  # from the prompt to its last image; after that the prompt fails and is placed again


@dataclass(slots=True, eq=False, weakref_slot=True)
class PromptImage:
    """One image of one prompt. It is ready once it has pixels or rows."""

    span: ImageSpan
    pixels: Pixels | None = None
    rows: Tensor | None = None  # [span.length, H], on the device
    over: bool = False  # the prompt has read all of it, so its data is dropped

    @property
    def ready(self) -> bool:
        return self.over or self.pixels is not None or self.rows is not None

    def let_go(self, position: int) -> None:
        """Drop the data once the prompt has been read past it. Shared rows stay in the cache."""
        if self.span.offset + self.span.length <= position:
            self.over, self.rows, self.pixels = True, None, None

    def fits(self, rows: int, columns: int) -> None:
        """Raise InvalidRequest if an image of `rows` x `columns` tokens does not match its span in the prompt."""
        if (rows, columns) != (self.span.rows, self.span.columns):
            raise InvalidRequest(
                f"an image has {rows} x {columns} tokens, but its span in the prompt has {self.span.rows} x "
                f"{self.span.columns}",
                param="messages",
            )

    def fitting(self, rows: Tensor | None) -> Tensor | None:
        """Flatten cached rows [rows, columns, H] to [tokens, H]; None stays None.

        Raises InvalidRequest if they do not fit.
        """
        if rows is None:
            return None
        self.fits(*rows.shape[:2])
        return rows.flatten(0, 1)

    def overlap(self, start: int, end: int) -> tuple[int, int]:
        """The part of prompt positions start .. end that the image fills; empty unless the first value is smaller."""
        return max(start, self.span.offset), min(end, self.span.offset + self.span.length)


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


class Images(Protocol):
    """Access to images; the implementations are ImageIntake and NoImages."""

    @property
    def busy(self) -> bool:
        """Whether decoding is in progress, whose end no socket announces."""
        ...

    @property
    def refused_messages(self) -> int:
        """Invalid messages from the router since the start."""
        ...

    def watch(self, poller: zmq.Poller) -> None: ...

    def expect(self, spans: Sequence[ImageSpan], waiting: Sequence[ImageSpan]) -> tuple[PromptImage, ...]:
        """Create the images of a new prompt; `waiting` are those of waiting prompts.

        Raises InvalidRequest or Overloaded.
        """
        ...

    def receive(self) -> None:
        """Receive the images that have arrived and start to decode them."""
        ...

    def claim(self, images: Iterable[PromptImage]) -> None:
        """Give images the pixels or rows that are ready. Raises RequestError for an image that cannot be decoded."""
        ...

    def arrived(self, images: Iterable[PromptImage]) -> bool:
        """Whether the router has delivered all of them; some may not be decoded yet."""
        ...

    def close(self) -> None: ...


class NoImages:
    """The images of a text-only model: there are none."""

    busy = False
    refused_messages = 0

    def watch(self, poller: zmq.Poller) -> None:
        pass

    def expect(self, spans: Sequence[ImageSpan], waiting: Sequence[ImageSpan]) -> tuple[PromptImage, ...]:
        if spans:
            raise InvalidRequest("this model does not accept images", param="messages")
        return ()

    def receive(self) -> None:
        pass

    def claim(self, images: Iterable[PromptImage]) -> None:
        pass

    def arrived(self, images: Iterable[PromptImage]) -> bool:
        return True

    def close(self) -> None:
        pass


class ImageIntake:
    """Receives and decodes images. Only the main loop uses it; its threads run `read`."""

    def __init__(
        self,
        dealer: Dealer,
        read: Callable[[bytes], Pixels],
        cache: RowCache,
        log: Log,
    ) -> None:
        """`read` decodes one image, or raises InvalidRequest."""
        self._dealer = dealer
        self._read = read
        self._cache = cache
        self._log = log
        self._threads = ThreadPoolExecutor(DECODERS, thread_name_prefix="images")
        self._pixels: OrderedDict[bytes, Future[Pixels]] = OrderedDict()
        self._expected: WeakSet[PromptImage] = WeakSet()  # images of all prompts that are still alive
        self.refused_messages = 0

    @property
    def busy(self) -> bool:
        return any(not future.done() for future in self._pixels.values())

    def watch(self, poller: zmq.Poller) -> None:
        poller.register(self._dealer.socket, zmq.POLLIN)

    def expect(self, spans: Sequence[ImageSpan], waiting: Sequence[ImageSpan]) -> tuple[PromptImage, ...]:
        tokens = sum(span.length for span in (*spans, *waiting))
        if spans and waiting and (len(waiting) + len(spans) > MAX_WAITING or tokens > MAX_WAITING_TOKENS):
            raise Overloaded(f"{len(waiting)} images already wait on this prefill node; try again later")
        images = tuple(PromptImage(span) for span in spans)
        self._expected.update(images)
        return images

    def receive(self) -> None:
        for frame in self._dealer.drain(AT_ONCE):
            try:
                message = codec.decode(frame)
            except ProtocolError as error:
                self.refused_messages += 1
                self._log.warning("refused a message from the router", error=str(error))
                continue
            known = self._pixels.get(message.digest)
            # A second attempt may succeed: with more memory, or with other bytes.
            if known is not None and not _failed(known):
                continue
            if self._cache.get(message.digest) is not None:
                continue
            self._pixels[message.digest] = self._threads.submit(self._decode, message)
            self._make_room()

    def claim(self, images: Iterable[PromptImage]) -> None:
        for image in images:
            if image.ready:
                continue
            image.rows = image.fitting(self._cache.get(image.span.digest))
            future = self._pixels.get(image.span.digest)
            if image.rows is None and future is not None and future.done():
                self._pixels.move_to_end(image.span.digest)  # another prompt may contain the same image
                pixels = future.result()
                image.fits(pixels.rows, pixels.columns)
                image.pixels = pixels

    def arrived(self, images: Iterable[PromptImage]) -> bool:
        return all(image.ready or image.span.digest in self._pixels for image in images)

    def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._dealer.close()

    def _make_room(self) -> None:
        """Evict the oldest images that no prompt waits for. `expect` bounds those that a prompt waits for."""
        wanted = {image.span.digest for image in self._expected if not image.ready}
        idle = [digest for digest in self._pixels if digest not in wanted]
        while len(idle) > UNCLAIMED or self._decoded_bytes(idle) > UNCLAIMED_BYTES:
            self._pixels.pop(idle.pop(0)).cancel()

    def _decoded_bytes(self, digests: Iterable[bytes]) -> int:
        futures = [self._pixels[digest] for digest in digests]
        done = [future for future in futures if future.done() and future.exception() is None]
        return sum(future.result().values.nbytes for future in done)

    def _decode(self, image: ImageData) -> Pixels:
        data = image.data
        if salted_digest(hashlib.sha256(data).digest(), image.salt) != image.digest:
            raise InvalidRequest("the bytes of an image do not match its digest")
        try:
            return self._read(data)
        except InvalidRequest:
            raise
        except Exception as error:
            self._log.exception("cannot decode an image")
            raise InternalError(
                "an image could not be decoded; the log of the prefill node has the details"
            ) from error


def _failed(future: Future[Pixels]) -> bool:
    return future.done() and future.exception() is not None
