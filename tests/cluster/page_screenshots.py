"""Photographs the page of a real cluster for the documentation: under load, after a kill, and on a phone.

    python -m tests.cluster.page_screenshots [--folder docs/images]

It starts two prefill nodes and two decode nodes of the tiny model with EAGLE-3 on CPUs, sends Poisson arrivals with a
shared prefix, and kills a decode node. Needs Chromium.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
from contextlib import suppress
from pathlib import Path

import aiohttp

from tests.cluster.check_families import shipped
from tests.cluster.harness import ROOT, RunningCluster
from tests.fakes.browser import PHONE, WIDE, open_page

QUESTION = (
    "There are 8 stickers in every bag and Felix owns 8 bags. Then Anna takes 47 stickers away. "
    "How many stickers are left?"
)
RATE = 2.5  # requests per second
PREFIX = "Read carefully, then answer with one number. " * 3
LOADED, AFTER_KILL = 40.0, 3.0  # seconds until a photograph


async def _arrivals(url: str) -> None:
    """Send chats for ever; those that fail because a node was killed are left to the page."""
    rng = random.Random(1)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session:
        sent: set[asyncio.Task[None]] = set()
        try:
            while True:
                first, second = rng.randrange(10, 99), rng.randrange(1, 10)
                sent.add(asyncio.create_task(_ask(session, url, f"{PREFIX}What is {first} plus {second}?")))
                await asyncio.sleep(rng.expovariate(RATE))
        finally:
            for task in sent:
                task.cancel()
            await asyncio.gather(*sent, return_exceptions=True)


async def _ask(session: aiohttp.ClientSession, url: str, question: str) -> None:
    body = {"messages": [{"role": "user", "content": question}], "max_tokens": 96, "ignore_eos": True}
    with suppress(aiohttp.ClientError, TimeoutError):
        async with session.post(f"{url}/v1/chat/completions", json=body) as answer:
            await answer.read()


async def photograph(cluster: RunningCluster, folder: Path) -> None:
    """Write page.png, page-phone.png and page-after-kill.png."""
    load = asyncio.create_task(_arrivals(cluster.url))
    try:
        async with (
            open_page(cluster.url, expected=("503",)) as page,
            open_page(cluster.url, size=PHONE) as phone,
        ):
            await page.fill("#temperature", "0")
            await asyncio.sleep(LOADED)
            await page.fill("#prompt", QUESTION)
            await page.press("#prompt", "Enter")
            await page.wait_for_selector(".message.assistant .figures")
            await page.screenshot(path=folder / "page.png", full_page=True)
            await phone.screenshot(path=folder / "page-phone.png")
            cluster.kill("decode-1")
            await asyncio.sleep(AFTER_KILL)
            await page.evaluate("window.scrollTo(0, 0)")
            await page.set_viewport_size({"width": WIDE[0], "height": 620})
            await page.screenshot(path=folder / "page-after-kill.png")
    finally:
        load.cancel()
        with suppress(asyncio.CancelledError):
            await load


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=ROOT / "docs" / "images")
    folder = parser.parse_args().folder
    sections = shipped("eagle3")
    shared = {name: sections[name] for name in ("model", "speculation")}
    with (
        tempfile.TemporaryDirectory() as directory,
        RunningCluster(Path(directory), prefill=2, decode=2, config=shared) as cluster,
    ):
        asyncio.run(photograph(cluster, folder))


if __name__ == "__main__":
    main()
