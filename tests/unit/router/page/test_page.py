"""The page in a headless Chromium, against a router whose answers are scripted."""

from __future__ import annotations

import pytest
from playwright.async_api import expect

from common.errors import Unavailable
from tests.fakes.api_keys import bearer
from tests.fakes.browser import PHONE, needs_browser, open_page
from tests.unit.router.auth.test_gates import key_gate
from tests.unit.router.conftest import Rig, Serve
from tests.unit.router.scripted_generator import delta, one_by_one

pytestmark = needs_browser
HOSTILE = "<img src=x onerror=alert(1)><script>alert(2)</script> & <b>bold</b>"
END = 2  # the token that ends an answer
METRICS = """# HELP a b
x_total{engine="p",role="prefill"} 3
x_total{engine="q\\\\ \\"quoted\\"",role="decode"} 4.5
h_bucket{le="0.1"} 10
h_bucket{le="0.2"} 20
h_bucket{le="+Inf"} 20
"""


async def test_text_of_the_model_is_shown_as_text(rig: Rig) -> None:
    ids = rig.tokenizer.encode(HOSTILE, add_special_tokens=False)
    rig.generator.will(*one_by_one([*ids, END], "stop"))
    async with open_page(rig.url) as page:
        await page.fill("#prompt", "Say something <i>odd</i>")
        await page.press("#prompt", "Enter")
        await page.wait_for_selector(".message.assistant .figures")
        answer = page.locator(".message.assistant")
        assert (await answer.text_content() or "").startswith(HOSTILE)
        assert await page.locator("#messages img, #messages script, #messages b, #messages i").count() == 0
        figures = await answer.locator(".figures").text_content() or ""
        assert f"{len(ids) + 1} out" in figures


async def test_the_next_message_carries_the_conversation(rig: Rig) -> None:
    ids = rig.tokenizer.encode("An answer", add_special_tokens=False)
    rig.generator.will(*one_by_one([*ids, END], "stop"))
    async with open_page(rig.url) as page:
        for question in ("First", "Second"):
            await page.fill("#prompt", question)
            await page.press("#prompt", "Enter")
            await expect(page.locator("#messages .figures")).to_have_count(1 + (question == "Second"))
    first, second = (
        rig.tokenizer.decode(request.token_ids, skip_special_tokens=True)
        for request in rig.generator.requests
    )
    assert "First" in first
    assert "Second" not in first
    assert all(part in second for part in ("First", "An answer", "Second"))


async def test_an_answer_can_be_stopped_and_an_error_is_shown(rig: Rig) -> None:
    rig.generator.will(delta([331]), 3600.0)
    rig.generator.will(Unavailable("no prefill node is up"))
    async with open_page(rig.url, expected=("503",)) as page:
        await page.fill("#prompt", "Never ends")
        await page.click("#send")
        await page.wait_for_selector("#stop:visible")
        await expect(page.locator(".message.assistant")).not_to_be_empty()
        await page.click("#stop")
        await page.wait_for_selector("#send:visible")
        await page.fill("#prompt", "Fails")
        await page.click("#send")
        await page.wait_for_selector(".message.error")
        assert "no prefill node is up" in (await page.locator(".message.error").text_content() or "")
    assert rig.generator.closed[0] == rig.generator.requests[0].request_id, "the stopped request has ended"
    assert rig.generator.active == 0


async def test_the_key_is_asked_for_and_sent(serve: Serve) -> None:
    rig = await serve(gate=key_gate())
    async with open_page(rig.url, expected=("401",)) as page:
        await page.wait_for_selector("#key-dialog[open]")
        await page.fill("#key", bearer("secret-a")["Authorization"].removeprefix("Bearer "))
        await page.click("#key-dialog button[value=use]")
        await expect(page.locator("#notice")).to_contain_text("scope admin")
        assert await page.input_value("#key") == ""
        assert await page.evaluate("document.cookie + JSON.stringify(localStorage)") == "{}"


async def test_a_phone_has_no_sideways_scrolling(rig: Rig) -> None:
    async with open_page(rig.url, size=PHONE) as page:
        await expect(page.locator("#waterfall .request")).to_have_count(1)
        assert await page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


BEFORE = """x_total{engine="p",role="prefill"} 100
x_total{engine="gone",role="decode"} 1000
h_bucket{le="0.1"} 10
h_bucket{le="0.2"} 10
h_bucket{le="+Inf"} 10
"""
FIGURES = {
    "m.total(found, 'x_total')": 7.5,
    "m.total(found, 'x_total', {role: 'prefill'})": 3,
    "m.total(found, 'absent')": 0,
    "found.get('x_total')[1].labels.engine": 'q\\ "quoted"',
    "m.quantile(m.buckets(found.get('h_bucket')), 0.5)": 0.1,
    "m.quantile(m.buckets(found.get('h_bucket')), 0.75)": 0.15,
    "m.quantile([], 0.5)": None,
    # p fell from 100: its node has started again; a third node is gone
    "w.increase('x_total', 60)": 7.5,
    "w.rate('x_total', 60)": 0.75,
    "w.quantile('h', 60, 0.5)": 0.15,
    "w.quantile('h', 5, 0.5)": 0.15,
    "p.parts({'prefill.prefill_start': 1, 'prefill.prefill_end': 2, finished: 5}, 5)": [
        ["queue", 0, 1],
        ["compute", 1, 2],
        ["decode", 2, 5],
    ],
}


async def test_figures(rig: Rig) -> None:
    async with open_page(rig.url) as page:
        values = await page.evaluate(
            f"""async ([before, text]) => {{
                const [m, p] = await Promise.all([import("/page/series.js"), import("/page/waterfall.js")]);
                const found = m.parseMetrics(text);
                const w = new m.Window(60);
                w.add(0, m.parseMetrics(before));
                w.add(10, found);
                return [{", ".join(FIGURES)}];
            }}""",
            [BEFORE, METRICS],
        )
    for (expression, expected), value in zip(FIGURES.items(), values, strict=True):
        near = pytest.approx(expected) if isinstance(expected, float) else expected
        assert value == near, expression
