"""The page at / in a headless Chromium, with a real cluster: what it shows is what the API says."""

from __future__ import annotations

import json
from urllib.request import Request, urlopen

import pytest
from playwright.async_api import expect

from tests.cluster.harness import RunningCluster
from tests.fakes.browser import needs_browser, open_page

JSON = {"Content-Type": "application/json"}
pytestmark = [needs_browser, pytest.mark.timeout(300)]


async def test_the_page_shows_the_cluster_and_chats(cluster: RunningCluster) -> None:
    async with open_page(cluster.url) as page:
        await expect(page.locator("#state")).to_have_text("ready")
        for name in ("prefill-0", "decode-0"):
            node = page.locator(f'#picture [data-node="{name}"]')
            await expect(node).to_contain_text("0 running, 0 waiting")
            await expect(node).not_to_have_class("down")
        assert await page.locator("#picture .link").count() == 1
        await page.fill("#temperature", "0")
        await page.fill("#max-tokens", "24")
        await page.fill("#prompt", "What is 64 minus 47?")
        await page.press("#prompt", "Enter")
        await expect(page.locator(".message.assistant .figures")).to_contain_text("out")
        request = page.locator("#waterfall .request")
        await expect(request).to_have_count(1)
        await expect(request).to_contain_text("prefill-0 → decode-0")
        for part in ("compute", "decode"):
            # The prefill node's report may follow the last token: the page asks again.
            await expect(request.locator(f".part.{part}")).to_have_count(1)
        # The graphs run on the tape; the figures of the last minute are those of this one request.
        for name in ("First token", "Between tokens"):
            value = page.locator("#figures div", has_text=name).locator("dd")
            await expect(value).to_contain_text("ms")
        shown = await page.locator(".message.assistant").text_content() or ""
    with urlopen(f"{cluster.url}/requests", timeout=30) as answer:
        (timeline,) = json.load(answer)["requests"]
    assert timeline["outcome"] in ("stop", "length")
    body = {
        "messages": [{"role": "user", "content": "What is 64 minus 47?"}],
        "temperature": 0,
        "max_tokens": 24,
    }
    asked = Request(f"{cluster.url}/v1/chat/completions", json.dumps(body).encode(), JSON)
    with urlopen(asked, timeout=60) as answer:
        assert shown.startswith(json.load(answer)["choices"][0]["message"]["content"])
