"""Whose fault it is that an image was not decoded in time: that of the image, or that of the host."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator

import pytest

from common.errors import InvalidRequest, Overloaded
from router.images import inspector as image_inspector
from router.images.inspector import ImageInspector, ImageVerdict, InspectorProcess
from router.process.spawner import Spawner
from tests.fakes.hostile_images import file
from tests.fakes.waiting import PATIENCE, eventually

ANSWER = InspectorProcess.verdict


@pytest.fixture
async def inspector(spawner: Spawner) -> AsyncIterator[ImageInspector]:
    made = ImageInspector(spawner, max_pixels=1_000, seconds=PATIENCE)
    yield made
    await made.close()


async def test_a_decoder_that_was_stopped_costs_no_image(inspector: ImageInspector) -> None:
    await inspector.check(file(), "image/png")
    stopped = inspector.pid
    assert stopped is not None
    os.kill(stopped, signal.SIGSTOP)
    inspector.seconds = 0.1
    checked = asyncio.create_task(inspector.check(file(), "image/png"))
    await eventually(lambda: inspector.pid != stopped)
    inspector.seconds = PATIENCE
    assert await checked == (8, 6)


async def test_an_image_whose_decoders_are_all_stopped_can_be_sent_again(
    inspector: ImageInspector, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def stopped(self: InspectorProcess) -> ImageVerdict:
        """Stop the process once it is ready."""
        verdict = await ANSWER(self)
        os.kill(self.child.pid, signal.SIGSTOP)
        return verdict

    with monkeypatch.context() as patch:
        patch.setattr(InspectorProcess, "verdict", stopped)
        inspector.seconds = 0.1
        with pytest.raises(Overloaded, match="could not run"):
            await inspector.check(file(), "image/png")
    inspector.seconds = PATIENCE
    await inspector.check(file(), "image/png")


async def test_the_first_answer_of_a_decoder_for_a_cancelled_request_does_not_go_to_the_next(
    inspector: ImageInspector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says that the decoder is ready. Taken for a verdict, it would be that on an image without a size."""
    starting = asyncio.Event()

    async def unread(self: InspectorProcess) -> ImageVerdict:
        starting.set()
        await asyncio.Event().wait()
        raise AssertionError("nothing sets the event")

    with monkeypatch.context() as patch:
        patch.setattr(InspectorProcess, "verdict", unread)
        given_up = asyncio.create_task(inspector.check(file(), "image/png"))
        await starting.wait()
        given_up.cancel()
        await asyncio.gather(given_up, return_exceptions=True)
    assert await inspector.check(file(), "image/png") == (8, 6)


async def test_an_image_that_keeps_a_decoder_busy_is_refused(
    inspector: ImageInspector, monkeypatch: pytest.MonkeyPatch
) -> None:
    await inspector.check(file(), "image/png")
    assert inspector.pid is not None
    os.kill(inspector.pid, signal.SIGSTOP)
    inspector.seconds = 0.2
    times = iter([1.0, 1.2])
    monkeypatch.setattr(image_inspector, "processor_seconds", lambda _: next(times))
    with pytest.raises(InvalidRequest, match="too much time or memory"):
        await inspector.check(file(), "image/png")
