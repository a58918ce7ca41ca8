"""Images of a chat request: data URLs, limits, decoding in a process of its own, placeholders."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
import os
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from PIL import Image as Pil

from common.checkpoint.llava_config import LlavaVision
from common.checkpoint.qwen_vl_config import QwenVision
from common.errors import InvalidRequest, Overloaded
from common.image_files import decode_image
from router.images import inspector as image_inspector
from router.images import loader as images
from router.images.inspector import ImageInspector
from router.images.loader import Image, ImageLimits, RefusingImageLoader, VerifyingImageLoader
from router.images.placeholders import place_images
from router.process.spawner import Spawner
from router.requests.openai_schema import ContentPart, ImageUrl, Message
from tests.fakes.hostile_images import file, huge, noise, progressive, url
from tests.fakes.waiting import PATIENCE, eventually

LIMITS = ImageLimits(max_count=3, max_bytes=5_000, max_request_bytes=9_000, max_held_bytes=12_000)
VISION = LlavaVision(
    "LlavaForConditionalGeneration", "clip_vision_model", "{}", 6, 4, 32, (-2,), True, "gelu", True
)


def phone() -> bytes:
    """Two pictures in one JPEG file, of 8 x 6 and 4 x 4 pixels."""
    out = io.BytesIO()
    second = Pil.new("RGB", (4, 4), (0, 0, 255))
    Pil.new("RGB", (8, 6), (200, 30, 30)).save(out, "MPO", save_all=True, append_images=[second])
    return out.getvalue()


def asking(*addresses: str) -> list[Message]:
    parts = [ContentPart("image_url", image_url=ImageUrl(each)) for each in addresses]
    return [Message("system", "be short"), Message("user", [*parts, ContentPart("text", "What is it?")])]


class Fetched:
    """A fetcher that always has an image."""

    async def fetch(self, address: str) -> bytes:
        return file("GIF")

    async def close(self) -> None:
        pass


@pytest.fixture
async def inspector(spawner: Spawner) -> ImageInspector:
    return ImageInspector(spawner, max_pixels=1_000, seconds=PATIENCE)


@pytest.fixture
async def loader(inspector: ImageInspector) -> AsyncIterator[VerifyingImageLoader]:
    made = VerifyingImageLoader(LIMITS, VISION, inspector, Fetched())
    yield made
    await made.close()
    assert inspector.pid is None


async def test_every_kind_is_taken_in_order(loader: VerifyingImageLoader) -> None:
    kinds = {"image/png": file(), "image/jpeg": file("JPEG"), "image/webp": file("WEBP")}
    images = await loader.load(asking(*(url(data, kind) for kind, data in kinds.items())))
    assert [image.data for image in images] == list(kinds.values())
    assert images[0].digest == hashlib.sha256(kinds["image/png"]).digest()
    again = await loader.load(asking(url(kinds["image/jpeg"], "image/jpg"), "https://any.example/x.gif"))
    assert again[0] == images[1], "the usual misspelling"
    assert again[1].data == file("GIF")
    plain = [Message("user", [ContentPart("image_url", image_url=url(file()))])]
    assert len(await loader.load(plain)) == 1, "image_url as a text, as some clients send it"
    assert await loader.load([Message("user", "no image")]) == ()


BAD = {
    "not base64": ("data:image/png;base64,@@@@", "not valid base64"),
    "no base64": ("data:image/png,abc", "looks like data:image/png;base64"),
    "another type": (url(file(), "image/svg+xml"), "are not supported"),
    "lying": (url(file("JPEG")), "declared as image/png but is image/jpeg"),
    "no image": (url(b"GIF89a nonsense"), "cannot be read"),
    "text": (url(b"<svg/>"), "cannot be read"),
    "too many scans": (url(progressive(41), "image/jpeg"), "more than the 50 scans"),
    "truncated": (url(noise()[:1_500]), "is damaged"),
    "too many pixels": (url(file(size=(100, 11))), "100 x 11 pixels"),
    "far too many pixels": (url(huge()), "more than the 1000 pixels"),
    "too many bytes": (url(os.urandom(5_001)), "larger than 5000 bytes"),
    "empty": ("data:image/png;base64,", "cannot be read"),
}


@pytest.mark.parametrize("case", BAD)
async def test_a_bad_image_is_a_400_that_names_its_part(loader: VerifyingImageLoader, case: str) -> None:
    address, said = BAD[case]
    with pytest.raises(InvalidRequest, match=said) as error:
        await loader.load(asking(url(file()), address))
    assert error.value.param == "messages[1].content[1].image_url"
    assert str(error.value).startswith("messages[1].content[1].image_url: ")
    assert len(await loader.load(asking(url(file())))) == 1, "the next one is served"


@pytest.mark.parametrize("piece", [4, 8, images.PIECE])
def test_base64_is_decoded_piece_by_piece_as_in_one(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that decodes 20 MB at once holds the GIL, and so the event loop, for a tenth of a second."""
    monkeypatch.setattr(images, "PIECE", piece)
    longest = []
    decode = base64.b64decode
    monkeypatch.setattr(
        base64,
        "b64decode",
        lambda text, validate: (longest.append(len(text)), decode(text, validate=validate))[1],
    )
    for length in range(40):
        data = os.urandom(length)
        assert images.from_base64(f"xy{in_base64(data)}", 2) == data
    assert max(longest) <= piece
    for broken in (
        "AAA",
        "AA==AAAA",
        "A===",
        "AAA=AAA=",
        "AAAA\nAAAA",
        "AAAAAAA\u00e9",
        "====",
        "AAAA=A==",
        "=AAA",
    ):
        with pytest.raises(InvalidRequest, match="not valid base64"):
            images.from_base64(broken, 0)


def in_base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


QWEN = QwenVision("", "{}", 6, 7, 4, 2, 2, 256, 1920, 1 / 255, (0.5,) * 3, (0.5,) * 3)


async def test_an_image_takes_as_many_tokens_as_its_size_says(
    loader: VerifyingImageLoader, inspector: ImageInspector
) -> None:
    """The size is that after EXIF rotation; an image that is too narrow is refused with the name of its part."""
    loader = VerifyingImageLoader(LIMITS, QWEN, inspector, Fetched())
    exif = Pil.Exif()
    exif[0x0112] = 6  # rotate by 90 degrees
    turned = url(file("JPEG", (40, 16), exif=exif), "image/jpeg")
    images = await loader.load(asking(url(file(size=(40, 16))), turned))
    assert [(each.rows, each.columns) for each in images] == [(2, 5), (5, 2)]
    with pytest.raises(InvalidRequest, match="more than 200 times") as error:
        await loader.load(asking(url(file()), url(file(size=(403, 2)))))
    assert error.value.param == "messages[1].content[1].image_url"


def test_text_that_spells_the_placeholder_of_a_video_is_refused() -> None:
    images = [Image(b"x", b"x" * 32, 1, 2)]
    assert place_images([1, 6, 2], images, QWEN, 50)[0] == [1, 6, 6, 2]
    with pytest.raises(InvalidRequest, match="videos are not supported"):
        place_images([1, 6, 7, 2], images, QWEN, 50)


async def test_count_and_bytes_of_a_request_are_bounded(loader: VerifyingImageLoader) -> None:
    with pytest.raises(InvalidRequest, match="4 images in one request, at most 3"):
        await loader.load(asking(*[url(file())] * 4))
    large = file("PNG", (30, 30)) + b"\0" * 4_500  # bytes past the end of a PNG are ignored
    with pytest.raises(InvalidRequest, match="at most 9000 bytes in total") as error:
        await loader.load(asking(url(large), url(large), url(large)))
    assert error.value.param == "messages[1].content[1].image_url"


async def test_what_requests_hold_together_is_bounded(loader: VerifyingImageLoader) -> None:
    image = Image(bytes(7_000), bytes(32), 1, 4)
    with loader.hold([image]):
        assert loader.held_bytes == 7_000
        with pytest.raises(Overloaded), loader.hold([image]):
            pass
        with loader.hold([]):
            pass
    with loader.hold([image]):
        pass
    assert loader.held_bytes == 0


async def test_images_that_wait_for_the_inspector_count_as_held(
    loader: VerifyingImageLoader, inspector: ImageInspector
) -> None:
    """Otherwise a few small pictures that decode slowly would let large bodies pile up."""
    large = file() + bytes(4_000)  # 5,500 characters of base64
    async with inspector.turn:
        waiting = [asyncio.create_task(loader.load(asking(url(large)))) for _ in range(2)]
        await eventually(lambda: loader.held_bytes > 10_000)
        with pytest.raises(Overloaded, match="images of other requests"):
            await loader.load(asking(url(large)))
        waiting[0].cancel()
        await asyncio.gather(waiting[0], return_exceptions=True)
        waiting.append(asyncio.create_task(loader.load(asking(url(large)))))
    for each in waiting[1:]:
        assert (await each)[0].data == large
    assert loader.held_bytes == 0
    with loader.hold([Image(bytes(20_000), bytes(32), 1, 4)]):
        pass  # a single one is accepted whatever its size: the body limit bounds it


async def test_a_text_only_model_takes_no_images() -> None:
    with pytest.raises(InvalidRequest, match="does not accept images") as error:
        await RefusingImageLoader().load(asking(url(file())))
    assert error.value.param == "messages[1].content[0].image_url"
    assert await RefusingImageLoader().load([Message("user", [ContentPart("text", "hi")])]) == ()


async def test_parts_of_other_types_are_refused(loader: VerifyingImageLoader) -> None:
    for part in (ContentPart("input_audio", "x"), ContentPart("image_url"), ContentPart("refusal", "x")):
        with pytest.raises(InvalidRequest, match="send text parts with `text` and image_url") as error:
            await loader.load([Message("user", [part])])
        assert error.value.param == "messages[0].content[0]"


async def test_a_decoder_that_dies_costs_one_image(spawner: Spawner) -> None:
    inspector = ImageInspector(spawner, max_pixels=1_000, seconds=PATIENCE)
    try:
        await inspector.check(file(), "image/png")
        assert inspector.pid is not None
        os.kill(inspector.pid, signal.SIGSEGV)
        with pytest.raises(InvalidRequest, match="too much time or memory"):
            await inspector.check(file(), "image/png")
        await inspector.check(file(), "image/png")
    finally:
        await inspector.close()


async def test_a_decoder_that_somebody_kills_costs_no_image(spawner: Spawner) -> None:
    """The kernel may kill it because the host has no memory left. Only an image that loses two of them is refused."""
    inspector = ImageInspector(spawner, max_pixels=1_000, seconds=PATIENCE)
    answer = image_inspector.InspectorProcess.verdict
    known: set[int] = set()
    deaths = 1

    async def dying(self: image_inspector.InspectorProcess) -> image_inspector.ImageVerdict:
        nonlocal deaths
        found = await answer(self)
        if deaths and self.child.pid not in known:
            deaths -= 1
            os.kill(self.child.pid, signal.SIGKILL)
        known.add(self.child.pid)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(image_inspector.InspectorProcess, "verdict", dying)
        try:
            await inspector.check(file(), "image/png")
            assert (deaths, len(known)) == (0, 2)
            await inspector.close()
            deaths = 2
            with pytest.raises(InvalidRequest, match="too much time or memory"):
                await inspector.check(file(), "image/png")
            await inspector.check(file(), "image/png")
        finally:
            await inspector.close()


async def test_how_long_an_image_waits_for_others_is_bounded(
    spawner: Spawner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_inspector, "TURN_SECONDS", 0.01)
    inspector = ImageInspector(spawner, max_pixels=1_000, seconds=PATIENCE)
    async with inspector.turn:
        with pytest.raises(Overloaded, match="the image decoder is busy"):
            await inspector.check(file(), None)
    await inspector.check(file(), None)
    await inspector.close()


async def test_the_answer_of_a_cancelled_request_does_not_go_to_the_next(spawner: Spawner) -> None:
    inspector = ImageInspector(spawner, max_pixels=1_000, seconds=PATIENCE)
    try:
        await inspector.check(file(), None)
        given_up = asyncio.create_task(inspector.check(b"no image", None))
        await asyncio.sleep(0)
        given_up.cancel()
        await asyncio.gather(given_up, return_exceptions=True)
        await inspector.check(file(), None)
    finally:
        await inspector.close()


async def test_a_defect_of_ours_is_an_answer_for_the_log_and_not_the_end(
    spawner: Spawner,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def decode(*_: object) -> Pil.Image:
        raise KeyError("MPO")

    monkeypatch.setattr(image_inspector, "decode_image", decode)
    verdict = image_inspector.inspect(image_inspector.Inspection(None, 9, b""))

    async def answered(process: object) -> image_inspector.ImageVerdict:
        return verdict

    inspector = ImageInspector(spawner, max_pixels=1_000, seconds=PATIENCE)
    await inspector.check(file(), None)
    monkeypatch.setattr(image_inspector.InspectorProcess, "verdict", answered)
    with pytest.raises(RuntimeError, match="KeyError: 'MPO'"):  # a 500, like every bug
        await inspector.check(file(), None)
    await inspector.close()


async def test_a_decoder_that_does_not_start_refuses_no_image_for_good(
    spawner: Spawner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it cannot be started, as for lack of memory, clients may try again. If it fails, that is an error of ours."""
    monkeypatch.setattr(sys, "executable", "/bin/false")
    inspector = ImageInspector(spawner, max_pixels=1_000, seconds=PATIENCE)
    with pytest.raises(Overloaded, match="its decoder cannot be started: .*; try again later"):
        await inspector.check(file(), None)
    monkeypatch.undo()
    monkeypatch.setattr(image_inspector, "PROGRAM", ("-c", "import sys; print(1); sys.exit('no memory')"))
    with pytest.raises(RuntimeError, match="inspection process: .* exit code 1; it printed: no memory"):
        await inspector.check(file(), None)
    monkeypatch.undo()
    await inspector.check(file(), None)
    await inspector.close()


def test_phones_write_several_pictures_into_one_jpeg() -> None:
    with Pil.open(io.BytesIO(phone())) as image:
        assert image.format == "MPO"
    found = decode_image(phone(), 100, "image/jpeg")
    assert (found.size, found.getpixel((0, 0))) == ((8, 6), decode_image(file("JPEG"), 100).getpixel((0, 0)))


def test_scans_are_counted_as_the_decoder_reads_them() -> None:
    """Thumbnails and films after the picture are not counted; fill bytes and restart marks hide none."""
    first = progressive(0)
    assert first.count(b"\xff\xda") == 10
    assert decode_image(progressive(40), 100).size == (8, 6)
    many = b"\xff\xda\x00\x08" * 99
    assert decode_image(progressive(0, comment=many), 100).size == (8, 6)
    assert decode_image(first + many, 100).size == (8, 6)
    scan = first[first.rindex(b"\xff\xda") : -2]
    for each in (b"\xff" + scan, b"\xff\xd3" + scan, b"\xff\x01" + scan, scan + b"\x12\xff\x00"):
        with pytest.raises(InvalidRequest, match="50 scans"):
            decode_image(first[:-2] + each * 41 + first[-2:], 100)


def test_the_first_frame_turned_and_in_rgb() -> None:
    frames = [Pil.new("RGB", (4, 4), colour) for colour in ((255, 0, 0), (0, 0, 255))]
    out = io.BytesIO()
    frames[0].save(out, "GIF", save_all=True, append_images=frames[1:])
    assert decode_image(out.getvalue(), 100).getpixel((0, 0)) == (255, 0, 0)
    exif = Pil.Exif()
    exif[0x0112] = 6  # rotate by 90 degrees
    assert decode_image(file("JPEG", (8, 6), exif=exif), 100).size == (6, 8)
    transparent = io.BytesIO()
    Pil.new("LA", (3, 3)).save(transparent, "PNG")
    assert decode_image(transparent.getvalue(), 100).mode == "RGB"


def test_placeholders_become_as_many_tokens_as_an_image_has_rows() -> None:
    images = [Image(b"one", b"1" * 32, 2, 2), Image(b"two", b"2" * 32, 1, 3)]
    prompt, placed = place_images([1, 6, 9, 6, 2], images, VISION, vocab_size=50)
    assert prompt == [1, 6, 6, 6, 6, 9, 6, 6, 6, 2]
    assert [(each.span.offset, each.span.rows, each.span.columns, each.data) for each in placed] == [
        (1, 2, 2, b"one"),
        (6, 1, 3, b"two"),
    ]
    assert place_images([1, 2], [], VISION, 50) == ([1, 2], ())


def test_a_placeholder_outside_the_vocabulary_is_written_as_a_token_of_the_prompt() -> None:
    """Repetition penalties count the prompt's tokens: a placeholder in the vocabulary counts, as in transformers.

    One without a logit must not be replaced by a token that the prompt lacks.
    """
    images = [Image(b"one", b"1" * 32, 1, 4), Image(b"two", b"2" * 32, 1, 1)]
    prompt, placed = place_images([77, 8, 77, 2], images, replace(VISION, image_token_id=77), 50)
    assert prompt == [8, 8, 8, 8, 8, 8, 2]
    assert [each.span.offset for each in placed] == [0, 5]
    assert set(place_images([6, 8, 6, 2], images, VISION, 50)[0]) == {6, 8, 2}


@pytest.mark.parametrize(
    ("count", "remedy"),
    [
        (0, "remove the placeholder's text"),
        (1, "remove the placeholder's text"),
        (3, "leaves out .* send them in messages of the user"),
    ],
)
def test_text_that_spells_the_placeholder_and_images_that_are_left_out_are_refused(
    count: int, remedy: str
) -> None:
    images = [Image(b"x", b"x" * 32, 1, 6)] * count
    with pytest.raises(InvalidRequest, match=f"2 placeholders for {count} images; .*{remedy}") as error:
        place_images([6, 5, 6], images, VISION, 50)
    assert error.value.param == "messages"
