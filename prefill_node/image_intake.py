"""Images of prompts: bytes from the router are decoded by threads next to the main loop, then claimed by prompts.

An image and its prompt arrive on different sockets, in either order. Several prompts may contain the same image: it is
decoded once, and not at all if its rows are cached.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future

import zmq

from common.engine.models.vision_part import Pixels
from common.errors import InternalError, InvalidRequest, Overloaded, ProtocolError
from common.ipc import Dealer
from common.messages.generation import ImageSpan
from common.messages.image_inbox import ImageData, codec, salted_digest
from common.observability.logs import Log
from common.started_threads import started_threads
from prefill_node.prompt_images import PendingImage, PromptImages, RowCache

MAX_WAITING = 512  # images of waiting prompts; their pixels are in host memory
MAX_WAITING_TOKENS = 1 << 19  # limit for those images; one token takes some kilobytes of pixels
UNCLAIMED = 256  # images kept although no prompt waits for them; the oldest are evicted
UNCLAIMED_BYTES = 1 << 30  # limit for their pixels
AT_ONCE = 4  # images received in one turn of the loop, each of which takes some milliseconds to copy
DECODERS = 2  # threads; Pillow releases the GIL while it decodes


class ImageIntake:
    """Receives and decodes images. Only the main loop uses it; its threads run `read`."""

    def __init__(
        self,
        dealers: Sequence[Dealer],
        read: Callable[[bytes], Pixels],
        cache: RowCache,
        prompts: PromptImages,
        log: Log,
    ) -> None:
        """`dealers`: one per router. `read` decodes one image, or raises InvalidRequest; `prompts` are filled in."""
        self._dealers = tuple(dealers)
        self._read = read
        self._cache = cache
        self._prompts = prompts
        self._log = log
        self._threads = started_threads(DECODERS, "images")
        self._pixels: OrderedDict[bytes, Future[Pixels]] = OrderedDict()
        # Copies of each image of `_pixels` that have come, less the prompts that have been told a failure of it.
        self._copies: dict[bytes, int] = {}
        self.refused_messages = 0

    @property
    def held(self) -> tuple[bytes, ...]:
        """Digests of the images that are decoded or wait to be, beginning with the one to be dropped first."""
        return tuple(self._pixels)

    @property
    def busy(self) -> bool:
        return any(not future.done() for future in self._pixels.values())

    def watch(self, poller: zmq.Poller) -> None:
        for dealer in self._dealers:
            poller.register(dealer.socket, zmq.POLLIN)

    def check(self, spans: Sequence[ImageSpan], waiting: Sequence[ImageSpan]) -> None:
        tokens = sum(span.length for span in (*spans, *waiting))
        if spans and waiting and (len(waiting) + len(spans) > MAX_WAITING or tokens > MAX_WAITING_TOKENS):
            raise Overloaded(f"{len(waiting)} images already wait on this prefill node; try again later")

    def expect(self, key: int, spans: Sequence[ImageSpan]) -> None:
        if not spans:
            return
        for span in spans:
            # The failure of earlier copies: the router sends one for this prompt.
            if self._copies.get(span.digest) == 0:
                self._drop(span.digest)
        self._prompts.add(key, map(PendingImage, spans))

    def receive(self) -> None:
        for frame in (frame for dealer in self._dealers for frame in dealer.drain(AT_ONCE)):
            try:
                message = codec.decode(frame)
            except ProtocolError as error:
                self.refused_messages += 1
                self._log.warning("refused a message from the router", error=str(error))
                continue
            known = self._pixels.get(message.digest)
            if known is None and self._cache.get(message.digest) is not None:
                continue
            self._copies[message.digest] = self._copies.get(message.digest, 0) + 1
            # A second attempt may succeed: with more memory, or with other bytes.
            if known is not None and not _failed(known):
                continue
            self._pixels[message.digest] = self._threads.submit(self._decode, message)
            self._make_room()

    def claim(self, key: int) -> bool:
        images = self._prompts.of(key)
        for image in images:
            if image.ready:
                continue
            image.take_cached(self._cache)
            future = self._pixels.get(image.span.digest)
            if image.rows is None and future is not None and future.done():
                self._pixels.move_to_end(image.span.digest)  # another prompt may contain the same image
                if _failed(future):
                    self._copies[image.span.digest] = max(self._copies[image.span.digest] - 1, 0)
                pixels = future.result()
                image.fits(pixels.rows, pixels.columns)
                image.pixels = pixels
        return all(image.ready for image in images)

    def arrived(self, key: int) -> bool:
        return all(image.ready or image.span.digest in self._pixels for image in self._prompts.of(key))

    def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)
        for dealer in self._dealers:
            dealer.close()

    def _make_room(self) -> None:
        """Evict the oldest images that no prompt waits for. `check` bounds those that a prompt waits for."""
        wanted = {image.span.digest for image in self._prompts if not image.ready}
        idle = [digest for digest in self._pixels if digest not in wanted]
        while len(idle) > UNCLAIMED or self._decoded_bytes(idle) > UNCLAIMED_BYTES:
            self._drop(idle.pop(0))

    def _drop(self, digest: bytes) -> None:
        del self._copies[digest]
        self._pixels.pop(digest).cancel()

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
