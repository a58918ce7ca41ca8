"""The chart of deploy/bench. Drawing needs matplotlib, which is no part of the usual environment."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import aiohttp
import pytest
import typer

from deploy import bench_cli
from deploy.load_generator.chart import draw, draw_search
from deploy.load_generator.goodput_search import GoodputSearch, Probe, SearchShape
from deploy.load_generator.measurement import Bodies, MeasuredLoad, Measurement, Target
from deploy.load_generator.plan import PromptShape
from deploy.load_generator.rate_search import Outcome, SearchBounds
from deploy.load_generator.runs import Run
from deploy.load_generator.stream import RequestTimes
from deploy.load_generator.summary import Limits, summarise

LIMITS = Limits(first=0.2, gap=0.015)


def measured(target: str, load: str, first: float) -> MeasuredLoad:
    run = Run([RequestTimes(first=first, gaps=[0.01], tokens=2), RequestTimes(first=1.0, tokens=1)], 1.0)
    return MeasuredLoad(target, load, summarise(run, LIMITS), {}, [], [], [1e3 * first, 1000.0], [10.0, 10.0])


def test_every_load_of_every_server_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = [measured(target, load, 0.1) for load in ("4/s", "8/s") for target in ("http://a", "http://b")]
    draw(rows, LIMITS, tmp_path / "chart.svg")
    texts = re.findall(r"<text[^>]*>([^<]+)</text>", (tmp_path / "chart.svg").read_text())
    labels = [f"{each.target}, {each.load}" for each in rows]
    assert sorted(text for text in texts if text in labels) == sorted(2 * labels), (
        "in the legend, and at the bars"
    )
    assert texts.count("50") == 4, "percent of the requests were good"


def test_a_load_without_answers_can_be_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    failed = summarise(Run([RequestTimes(error="x")], 1.0), LIMITS)
    draw([MeasuredLoad("a", "1/s", failed, {}, [], ["x"], [], [])], LIMITS, tmp_path / "chart.svg")
    assert (tmp_path / "chart.svg").stat().st_size


async def search_of_two_servers() -> GoodputSearch:
    async with aiohttp.ClientSession() as session:
        targets = [Target(label, "", "", session) for label in ("http://a", "http://b")]
        measurement = Measurement(targets, [], [1, 2], Bodies(700, 1), LIMITS)
        return GoodputSearch(measurement, SearchBounds(probes=2), SearchShape(60, PromptShape(10, 2)))


async def test_a_search_that_ended_before_its_first_probe_can_be_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw_search(await search_of_two_servers(), tmp_path / "chart.svg")
    assert "http://a: none" in (tmp_path / "chart.svg").read_text()


async def test_a_search_is_drawn_with_the_rates_that_it_found(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    found = await search_of_two_servers()
    for rate, share in ((4.0, 1.0), (8.0, 0.5)):
        summary = measured("http://a", f"{rate:g}/s", 0.1)
        shares = {1: share, 2: share - 0.1}
        found.probes.append(
            Probe("http://a", 1, rate, share > 0.9, share, shares, 100, 50, 0, 3, 4, 0, summary)
        )
        found.searches["http://a"].note(rate, share > 0.9)
    found.searches["http://b"].end(Outcome.FAILED, "status 401")
    draw_search(found, tmp_path / "chart.svg")
    texts = re.findall(r"<text[^>]*>([^<]+)</text>", (tmp_path / "chart.svg").read_text())
    assert "http://a: 4/s" in texts
    assert "http://b: none" in texts
    assert "requests within both limits, % (99 % searched for)" in texts
    assert {"4", "8"} <= set(texts)


def test_without_matplotlib_nothing_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(typer.Exit) as caught:
        bench_cli.run("http://127.0.0.1:1", seeds=1, svg_file=Path("chart.svg"))
    assert caught.value.exit_code == 2
    assert "--svg: needs matplotlib: pip install -e '.[bench]'" in capsys.readouterr().err
