"""Tests how images are received: their own socket, decoding threads, limits, and the cache of rows."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
import zmq

from common.engine.models.vision_part import Pixels
from common.errors import InternalError, InvalidRequest, Overloaded
from common.ipc import Dealer, RouterSocket
from common.messages.generation import ImageSpan
from common.messages.image_inbox import ImageData
from common.messages.wire import encode
from common.observability.logs import Log
from prefill_node import image_intake as module
from prefill_node.image_intake import ImageIntake
from prefill_node.prompt_images import PendingImage, PromptImages, RowCache
from tests.fakes.no_threads import allow_no_threads
from tests.fakes.vision import TOKENS, digest_of, file_of, read
from tests.fakes.waiting import PATIENCE, until


class Rig:
    """An intake, and the router's end of its socket."""

    def __init__(self, decode: Callable[[bytes], Pixels] = read, cache_bytes: int = 1 << 20) -> None:
        self.context = zmq.Context[zmq.Socket[bytes]]()
        self.router = RouterSocket(self.context, "inproc://images")
        dealer = Dealer(self.context, "inproc://images", b"p/images", received=4)
        until(lambda: self.router.drain() or self.router.reachable(b"p/images"))
        self.cache = RowCache(cache_bytes)
        self.prompts = PromptImages()
        self.intake = ImageIntake([dealer], decode, self.cache, self.prompts, Log("test"))
        self._keys = itertools.count(1)

    def send(self, digest: bytes, data: bytes) -> None:
        assert self.router.send(b"p/images", encode(ImageData(digest=digest, data=data)))

    def until(self, done: Callable[[], bool]) -> None:
        def received() -> bool:
            self.intake.receive()
            return done()

        until(lambda: done() or received())

    def prompt(self, *spans: ImageSpan) -> int:
        """Return the key of a new prompt with these images."""
        key = next(self._keys)
        self.intake.expect(key, spans)
        return key

    def image(self, key: int) -> PendingImage:
        """Return the only image of a prompt."""
        (image,) = self.prompts.of(key)
        return image

    def close(self) -> None:
        self.intake.close()
        self.router.close()
        self.context.term()


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.close()


def span_of(number: int, offset: int = 0) -> ImageSpan:
    return ImageSpan(offset, TOKENS, digest_of(number))


def test_prompts_claim_what_has_been_decoded(rig: Rig) -> None:
    one, same, other = (rig.prompt(span) for span in (span_of(1), span_of(1, 9), span_of(2)))
    assert not rig.intake.claim(one)
    rig.send(digest_of(1), file_of(1))
    rig.send(digest_of(1), file_of(1))
    rig.until(lambda: rig.intake.claim(one))
    assert rig.intake.claim(same), "the image is decoded once, for both prompts"
    pixels = rig.image(one).pixels
    assert rig.image(same).pixels is pixels is not None
    assert torch.equal(pixels.values, read(file_of(1)).values)
    assert not rig.intake.claim(other)
    assert not rig.intake.busy


def test_a_prompt_is_ready_with_the_last_of_its_images(rig: Rig) -> None:
    both = rig.prompt(span_of(1), span_of(2, 9))
    rig.send(digest_of(1), file_of(1))
    rig.until(lambda: rig.intake.claim(both) or rig.prompts.of(both)[0].ready)
    assert not rig.intake.claim(both)
    assert not rig.intake.arrived(both)
    rig.send(digest_of(2), file_of(2))
    rig.until(lambda: rig.intake.claim(both))
    assert rig.intake.arrived(both)


def test_a_prompt_that_is_forgotten_keeps_nothing(rig: Rig) -> None:
    gone, other = rig.prompt(span_of(1)), rig.prompt(span_of(2))
    text = rig.prompt()
    assert len(rig.prompts) == 2, "a prompt of text alone has no images to keep"
    rig.prompts.forget([gone, text, 99])
    assert list(rig.prompts) == [rig.image(other)]
    assert rig.intake.arrived(gone)


def test_rows_that_are_cached_need_no_pixels(rig: Rig) -> None:
    rows = torch.ones(1, TOKENS, 4)
    rig.cache.put(digest_of(1), rows)
    known = rig.prompt(span_of(1))
    assert rig.intake.claim(known)
    found = rig.image(known)
    assert found.rows is not None
    assert torch.equal(found.rows, rows[0])
    assert found.pixels is None
    rig.send(digest_of(1), file_of(1))
    rig.intake.receive()
    assert not rig.intake.held, "a cached image is not decoded again"


@pytest.mark.parametrize(
    ("digest", "data", "error"),
    [
        (digest_of(-1), file_of(-1), InvalidRequest),
        (digest_of(2), file_of(1), InvalidRequest),  # the file does not match its digest
        (digest_of(3), file_of(3), InternalError),  # a bug
    ],
)
def test_what_cannot_be_decoded_is_an_error_of_its_prompt(
    digest: bytes, data: bytes, error: type[Exception]
) -> None:
    def decode(data: bytes) -> Pixels:
        if data == file_of(3):
            raise ZeroDivisionError
        return read(data)

    rig = Rig(decode)
    rig.send(digest, data)
    wanted = rig.prompt(ImageSpan(0, TOKENS, digest))
    rig.until(lambda: bool(rig.intake.held) and not rig.intake.busy)
    with pytest.raises(error):
        rig.intake.claim(wanted)
    rig.close()


def test_an_image_that_failed_once_is_decoded_again_when_it_comes_again() -> None:
    failures = [MemoryError()]

    def decode(data: bytes) -> Pixels:
        if failures:
            raise failures.pop()
        return read(data)

    rig = Rig(decode)
    first, second = rig.prompt(span_of(1)), rig.prompt(span_of(1))
    rig.send(digest_of(1), file_of(1))
    rig.until(lambda: bool(rig.intake.held) and not rig.intake.busy)
    with pytest.raises(InternalError):
        rig.intake.claim(first)
    assert rig.intake.arrived(first)
    rig.send(digest_of(1), file_of(1))
    rig.until(lambda: not failures and claimed(rig.intake, second))
    rig.close()


def claimed(intake: ImageIntake, key: int) -> bool:
    """Claim the images of a prompt; False while the latest attempt to decode one of them has failed."""
    try:
        return intake.claim(key)
    except InternalError:
        return False


def test_a_failure_ends_the_prompts_that_wait_for_the_image_and_no_later_one() -> None:
    """A prompt usually arrives before its image, which is larger: then the earlier failure says nothing about it."""
    failures = [MemoryError("not now")]

    def decode(data: bytes) -> Pixels:
        if failures:
            raise failures.pop()
        return read(data)

    rig = Rig(decode)
    try:
        both = rig.prompt(span_of(1)), rig.prompt(span_of(1, 9))
        rig.send(digest_of(1), file_of(1))
        rig.until(lambda: bool(rig.intake.held) and not rig.intake.busy)
        for key in both:
            with pytest.raises(InternalError):
                rig.intake.claim(key)
        later = rig.prompt(span_of(1))
        assert not rig.intake.claim(later)
        assert not rig.intake.arrived(later)
        rig.send(digest_of(1), file_of(1))
        rig.until(lambda: rig.intake.claim(later))
    finally:
        rig.close()


def test_a_failure_ends_each_prompt_whose_copy_of_the_image_came_before_it() -> None:
    """The router sends nothing more for them, so they would wait for ARRIVAL_SECONDS."""
    may_fail = threading.Event()
    failures = [MemoryError("not now")]

    def decode(data: bytes) -> Pixels:
        if failures:
            may_fail.wait(PATIENCE)
            raise failures.pop()
        return read(data)

    rig = Rig(decode)
    try:
        first = rig.prompt(span_of(1))
        for _ in range(3):
            rig.send(digest_of(1), file_of(1))
        rig.send(digest_of(2), file_of(2))
        rig.until(lambda: digest_of(2) in rig.intake.held)
        may_fail.set()
        rig.until(lambda: not rig.intake.busy)
        with pytest.raises(InternalError):
            rig.intake.claim(first)
        for _ in range(2):
            with pytest.raises(InternalError):
                rig.intake.claim(rig.prompt(span_of(1)))
        later = rig.prompt(span_of(1))
        assert not rig.intake.arrived(later)
        rig.send(digest_of(1), file_of(1))
        rig.until(lambda: rig.intake.claim(later))
    finally:
        rig.close()


def test_images_are_decoded_when_no_thread_can_start(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The threads start with the node: a failure while it serves would end its main loop."""
    allow_no_threads(monkeypatch)
    key = rig.prompt(span_of(1), span_of(2, 9))
    rig.send(digest_of(1), file_of(1))
    rig.send(digest_of(2), file_of(2))
    rig.until(lambda: rig.intake.claim(key))


def test_malformed_messages_are_counted_and_dropped(rig: Rig) -> None:
    for frame in (b"", b"\xc1", encode(ImageSpan(0, 1, bytes(32))), b"x" * 100):
        rig.router.send(b"p/images", frame)
    rig.until(lambda: rig.intake.refused_messages == 4)
    assert not rig.intake.held


def test_images_whose_prompt_never_comes_give_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "UNCLAIMED", 3)
    held = threading.Event()
    begun: list[bytes] = []

    def decode(data: bytes) -> Pixels:
        begun.append(data)
        held.wait(PATIENCE)
        return read(data)

    rig = Rig(decode)
    for number in range(6):
        rig.send(digest_of(number), file_of(number))
        rig.until(lambda number=number: digest_of(number) in rig.intake.held)  # type: ignore[misc]
        until(lambda number=number: len(begun) == min(number + 1, module.DECODERS))  # type: ignore[misc]
    assert rig.intake.held == tuple(digest_of(number) for number in (3, 4, 5))
    assert rig.intake.busy
    held.set()
    lost, kept = rig.prompt(span_of(0)), rig.prompt(span_of(5))
    assert not rig.intake.claim(lost)
    rig.until(lambda: rig.intake.claim(kept))
    rig.until(lambda: not rig.intake.busy)
    assert len(begun) == 5, "an image that gives way before a thread begins is not decoded at all"
    rig.close()


def test_images_that_a_prompt_waits_for_never_give_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than UNCLAIMED images are all needed: evicting one would delay its prompt by ARRIVAL_SECONDS."""
    monkeypatch.setattr(module, "UNCLAIMED", 2)
    held = threading.Event()

    def decode(data: bytes) -> Pixels:
        held.wait(PATIENCE)
        return read(data)

    rig = Rig(decode)
    waiting = rig.prompt(*(span_of(n, TOKENS * n) for n in range(5)))
    rig.prompts.forget([rig.prompt(span_of(5))])
    for number in range(9):
        rig.send(digest_of(number), file_of(number))
        rig.until(lambda number=number: digest_of(number) in rig.intake.held)  # type: ignore[misc]
    assert rig.intake.held == tuple(digest_of(number) for number in (0, 1, 2, 3, 4, 7, 8))
    held.set()
    rig.until(lambda: rig.intake.claim(waiting))
    rig.send(digest_of(9), file_of(9))
    rig.until(lambda: digest_of(9) in rig.intake.held)
    assert len(rig.intake.held) == 2, "claimed images are kept no longer than others"
    rig.close()


def test_how_many_images_wait_is_bounded(rig: Rig) -> None:
    span = span_of(1)
    waiting = [span] * module.MAX_WAITING
    rig.intake.check([span], waiting[1:])
    with pytest.raises(Overloaded):
        rig.intake.check([span], waiting)
    rig.intake.check([], waiting)
    large = ImageSpan(0, module.MAX_WAITING_TOKENS, digest_of(1))
    rig.intake.check([large], [])  # a single image is accepted whatever its size
    with pytest.raises(Overloaded):
        rig.intake.check([span], [large])


@pytest.mark.parametrize(
    "span", [ImageSpan(0, 2 * TOKENS, digest_of(1)), ImageSpan(0, TOKENS, digest_of(1), TOKENS)]
)
def test_an_image_of_another_size_than_its_prompt_says_is_an_error_of_that_prompt(
    rig: Rig, span: ImageSpan
) -> None:
    rig.send(digest_of(1), file_of(1))
    right, wrong = rig.prompt(span_of(1)), rig.prompt(span)
    rig.until(lambda: rig.intake.claim(right))
    with pytest.raises(InvalidRequest, match="its span in the prompt has"):
        rig.intake.claim(wrong)
    assert not rig.image(wrong).ready
    rig.cache.put(digest_of(1), torch.ones(1, TOKENS, 4))
    with pytest.raises(InvalidRequest, match="1 x 5 tokens"):
        rig.intake.claim(rig.prompt(span))


def test_pixels_whose_prompt_never_comes_are_bounded_in_bytes(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "UNCLAIMED_BYTES", 2 * read(file_of(1)).values.nbytes)
    for number in range(6):
        rig.send(digest_of(number), file_of(number))
        rig.until(lambda number=number: digest_of(number) in rig.intake.held)  # type: ignore[misc]
        rig.until(lambda: not rig.intake.busy)
    assert rig.intake.held[-1] == digest_of(5)
    assert len(rig.intake.held) <= 3


def test_the_cache_keeps_the_rows_used_last_within_its_bytes() -> None:
    rows = [torch.full((2, 4), float(number)) for number in range(4)]  # 32 bytes each
    cache = RowCache(max_bytes=70)
    cache.put(b"0", rows[0])
    cache.put(b"1", rows[1])
    cache.put(b"1", rows[3])
    assert cache.get(b"1") is rows[1]
    assert cache.get(b"0") is rows[0]
    cache.put(b"2", rows[2])
    assert (len(cache), cache.nbytes) == (2, 64)
    assert cache.get(b"1") is None
    assert cache.get(b"0") is rows[0]
    nothing = RowCache(max_bytes=0)
    nothing.put(b"0", rows[0])
    assert (len(nothing), nothing.nbytes) == (0, 0)
