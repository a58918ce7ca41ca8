"""A headless Chromium for tests of the page, and what the page must not do there."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from playwright.async_api import Page, async_playwright

# Debian's and Ubuntu's names; CI installs chromium.
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(
    CHROMIUM is None and not os.environ.get("CI"),
    reason="no Chromium; install it, for example apt install chromium",
)
WIDE, PHONE = (1280, 900), (390, 844)  # pixels of the window


@asynccontextmanager
async def open_page(
    url: str, size: tuple[int, int] = WIDE, expected: tuple[str, ...] = ()
) -> AsyncIterator[Page]:
    """Open a page. At the end no script may have failed, and nothing may have been blocked or asked of another host.

    `expected`: parts of messages on the console that may appear, such as the status of a refused request.
    """
    problems: list[str] = []
    async with async_playwright() as playwright:
        # Chromium refuses to sandbox the processes of root, which CI is.
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        try:
            page = await browser.new_page(viewport={"width": size[0], "height": size[1]})
            page.set_default_timeout(120_000)
            page.on("pageerror", lambda error: problems.append(str(error)))
            page.on("console", lambda line: problems.append(line.text) if line.type == "error" else None)
            page.on(
                "request",
                lambda asked: None if asked.url.startswith((url, "data:")) else problems.append(asked.url),
            )
            await page.goto(url)
            yield page
        finally:
            await browser.close()
    assert [each for each in problems if not any(part in each for part in expected)] == []
