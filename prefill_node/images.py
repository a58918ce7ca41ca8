"""Images on their way into prompts: bytes from the router, decoded by threads beside the main loop, then claimed.

An image and the prompt that it belongs to come on different sockets, in either order. Several prompts may show the same
image: it is decoded once, and not at all where its rows are cached.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import zmq
from torch import Tensor

from common.errors import InternalError, InvalidRequest, Overloaded, ProtocolError
from common.ipc import Dealer
from common.messages.generation import ImageSpan
from common.messages.image_inbox import codec
from common.observability.logs import Log

MAX_WAITING = 512  # images of prompts that wait; their pixels are in host memory
UNCLAIMED = 256  # images decoded or being decoded whose prompt has not come; the oldest give way
DECODERS = 2  # threads; Pillow lets go of the interpreter while it decodes
ARRIVAL_SECONDS = 30.0  # from the prompt to its last image; then it is placed again


@dataclass(slots=True, eq=False)
class PromptImage:
    """One image of one prompt; ready once it has pixels or rows."""

    span: ImageSpan
    pixels: Tensor | None = None  # [3, size, size] float32, on the host
    rows: Tensor | None = None  # [span.length, H], on the device

    @property
    def ready(self) -> bool:
        return self.pixels is not None or self.rows is not None

    def overlap(self, start: int, end: int) -> tuple[int, int]:
        """The part of prompt positions start .. end that it fills, as positions; empty unless the first is less."""
        return max(start, self.span.offset), min(end, self.span.offset + self.span.length)


class RowCache:
    """Rows of images by content, least recently used first out. Prompts keep those that they use alive."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._rows: OrderedDict[bytes, Tensor] = OrderedDict()
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
    """What the node asks of either kind."""

    @property
    def busy(self) -> bool:
        """Whether something ends soon that no socket announces."""
        ...

    def watch(self, poller: zmq.Poller) -> None: ...

    def expect(self, spans: Sequence[ImageSpan], waiting: int) -> tuple[PromptImage, ...]:
        """The images of a new prompt, beside so many that wait. Raises InvalidRequest or Overloaded."""
        ...

    def receive(self) -> None:
        """Take in what has arrived."""
        ...

    def claim(self, images: Iterable[PromptImage]) -> None:
        """Give images what is ready for them. Raises RequestError for one that cannot be decoded."""
        ...

    def close(self) -> None: ...


class NoImages:
    """Of a model that reads text alone."""

    busy = False

    def watch(self, poller: zmq.Poller) -> None:
        pass

    def expect(self, spans: Sequence[ImageSpan], waiting: int) -> tuple[PromptImage, ...]:
        if spans:
            raise InvalidRequest("this model takes no images", param="messages")
        return ()

    def receive(self) -> None:
        pass

    def claim(self, images: Iterable[PromptImage]) -> None:
        pass

    def close(self) -> None:
        pass


class ImageIntake:
    """Used by the main loop alone; its threads run `read`."""

    def __init__(
        self,
        dealer: Dealer,
        read: Callable[[bytes], Tensor],
        tokens_per_image: int,
        cache: RowCache,
        log: Log,
    ) -> None:
        """`read` decodes one image into pixels [3, size, size], or raises InvalidRequest."""
        self._dealer = dealer
        self._read = read
        self._tokens = tokens_per_image
        self._cache = cache
        self._log = log
        self._threads = ThreadPoolExecutor(DECODERS, thread_name_prefix="images")
        self._pixels: OrderedDict[bytes, Future[Tensor]] = OrderedDict()
        self.refused_messages = 0

    @property
    def busy(self) -> bool:
        return any(not future.done() for future in self._pixels.values())

    def watch(self, poller: zmq.Poller) -> None:
        poller.register(self._dealer.socket, zmq.POLLIN)

    def expect(self, spans: Sequence[ImageSpan], waiting: int) -> tuple[PromptImage, ...]:
        if spans and waiting + len(spans) > MAX_WAITING:
            raise Overloaded(f"{waiting} images wait on this prefill node already; try again later")
        if any(span.length != self._tokens for span in spans):
            raise InvalidRequest(f"an image of this model takes {self._tokens} tokens", param="messages")
        return tuple(PromptImage(span) for span in spans)

    def receive(self) -> None:
        for frame in self._dealer.drain():
            try:
                message = codec.decode(frame)
            except ProtocolError as error:
                self.refused_messages += 1
                self._log.warning("refused a message from the router", error=str(error))
                continue
            if message.digest in self._pixels or self._cache.get(message.digest) is not None:
                continue
            self._pixels[message.digest] = self._threads.submit(self._decode, message.digest, message.data)
            while len(self._pixels) > UNCLAIMED:
                self._pixels.popitem(last=False)[1].cancel()

    def claim(self, images: Iterable[PromptImage]) -> None:
        for image in images:
            if image.ready:
                continue
            image.rows = self._cache.get(image.span.digest)
            future = self._pixels.get(image.span.digest)
            if image.rows is None and future is not None and future.done():
                self._pixels.move_to_end(image.span.digest)  # another prompt may show it
                image.pixels = future.result()

    def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._dealer.close()

    def _decode(self, digest: bytes, data: bytes) -> Tensor:
        if hashlib.sha256(data).digest() != digest:
            raise InvalidRequest("an image is not the one that its digest names")
        try:
            return self._read(data)
        except InvalidRequest:
            raise
        except Exception as error:
            self._log.exception("an image could not be processed")
            raise InternalError("an image could not be processed; the log has the details") from error
