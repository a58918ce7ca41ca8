"""deploy/bench against a scripted server: what is counted, what is refused, and its exit codes."""

from __future__ import annotations

import asyncio
import inspect
import io
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner, Result

from deploy import bench_cli
from deploy.load_generator.measurement import MeasuredLoad
from deploy.load_generator.plan import PlannedRequest, PromptShape, Segment, closed_plan
from deploy.load_generator.runs import CUT_OFF, EarlyStop, Run, Server, closed_loop, open_loop
from deploy.load_generator.stream import RequestTimes, stream_completion
from deploy.load_generator.summary import Limits, percent, summarise
from tests.cluster.harness import ROOT
from tests.fakes.openai_server import DONE, Event, OpenAiServer, finish, serving, token
from tests.fakes.waiting import PATIENCE

ANSWER: list[Event] = [token("a"), token("b"), token("c"), *finish(5), DONE]


async def stream(server: OpenAiServer, due: float | None = None) -> RequestTimes:
    async with serving(server), aiohttp.ClientSession() as session:
        return await stream_completion(session, f"{server.url}/v1/completions", b"{}", due)


async def test_events_with_tokens_are_counted() -> None:
    """The end and the usage are no tokens; the usage says how many tokens the events had."""
    times = await stream(OpenAiServer(ANSWER))
    assert times.error == ""
    assert (len(times.gaps), times.tokens, times.lag) == (2, 5, 0.0)
    assert times.first > 0
    assert times.total == pytest.approx(times.first + sum(times.gaps))


async def test_an_end_with_a_token_and_a_token_without_text_are_tokens() -> None:
    last = {"choices": [{"text": "z", "finish_reason": "length"}]}
    ids = {"choices": [{"text": "", "token_ids": [7], "finish_reason": "length"}]}
    for event in (last, ids):
        times = await stream(OpenAiServer([token(""), event, DONE]))
        assert (len(times.gaps), times.tokens) == (1, 2)


async def test_time_counts_from_when_a_request_was_due() -> None:
    """Zero on this clock is when the machine started, so the request is late by more than its answer takes."""
    times = await stream(OpenAiServer(ANSWER), due=0.0)
    assert times.first > times.lag > sum(times.gaps)


@pytest.mark.parametrize(
    ("server", "error"),
    [
        (OpenAiServer(status=503), "status 503: too busy"),
        (OpenAiServer([token("a"), {"error": {"message": "gone"}}]), "the stream broke: gone"),
        (OpenAiServer([token("a")]), "the stream ended without [DONE]"),
        (OpenAiServer([*finish(0), DONE]), "an answer without a token"),
        (OpenAiServer(["{"]), "Input data was truncated"),
        (
            OpenAiServer(['{"error": "\udcff"}']),
            "'utf-8' codec can't decode byte 0xff in position 0: invalid start byte",
        ),
    ],
)
async def test_failures_are_noted(server: OpenAiServer, error: str) -> None:
    assert (await stream(server)).error == error


async def run_loop(server: OpenAiServer, clients: int, count: int) -> list[RequestTimes]:
    async with serving(server), aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        target = Server(session, f"{server.url}/v1/completions", lambda request: b"{}")
        if clients:
            return (await closed_loop(target, closed_plan(count, PromptShape(4, 1), 1), clients)).requests
        plan = [PlannedRequest(0.0, (Segment((0, 0), 4),), 1)] * count
        return (await open_loop(target, plan)).requests


async def test_an_open_loop_waits_for_no_answer() -> None:
    """Nobody is answered before all requests are there."""
    found = await asyncio.wait_for(run_loop(OpenAiServer(ANSWER, hold=10), 0, 10), PATIENCE)
    assert [each.error for each in found] == [""] * 10


async def test_a_closed_loop_has_one_request_per_client() -> None:
    server = OpenAiServer(ANSWER, hold=3)
    found = await asyncio.wait_for(run_loop(server, 3, 10), PATIENCE)
    assert [each.error for each in found] == [""] * 10
    assert server.most_at_once == 3


@pytest.mark.parametrize(
    ("due", "max_overdue", "sent"),
    # Only a request that was due earlier than the last one can be overdue, however late the last one is sent.
    [([0.0] * 3, 2, 3), ([0.0] * 5 + [0.3] * 4, 4, 5), ([0.0] * 5 + [0.3], 5, 6)],
)
async def test_a_server_that_does_not_keep_up_ends_an_impatient_loop(
    due: list[float], max_overdue: int, sent: int
) -> None:
    """Nobody is ever answered. Requests that were sent are cut off, and no more are sent if too many are overdue."""
    server = OpenAiServer(ANSWER, hold=1000)
    plan = [PlannedRequest(each, (Segment((0, 0), 4),), 1) for each in due]
    async with serving(server), aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        target = Server(session, f"{server.url}/v1/completions", lambda request: b"{}")
        early_stop = EarlyStop(overdue=0.2, max_overdue=max_overdue, drain=0.2)
        run = await asyncio.wait_for(open_loop(target, plan, early_stop=early_stop), PATIENCE)
    assert [each.error for each in run.requests] == [CUT_OFF] * sent
    assert (run.outstanding, run.unsent) == (sent, len(due) - sent)
    assert run.seconds > 0.2
    assert all(each.lag > 0 for each in run.requests)


async def test_a_patient_loop_waits_for_late_answers() -> None:
    server = OpenAiServer(ANSWER, hold=2)
    plan = [PlannedRequest(each, (Segment((0, 0), 4),), 1) for each in (0.0, 0.2)]
    async with serving(server), aiohttp.ClientSession() as session:
        target = Server(session, f"{server.url}/v1/completions", lambda request: b"{}")
        run = await open_loop(target, plan, early_stop=EarlyStop(overdue=0.01, max_overdue=1, drain=PATIENCE))
    assert [each.error for each in run.requests] == ["", ""]
    assert (run.outstanding, run.unsent) == (0, 0)


# -- the command -------------------------------------------------------------------------------------------------


def command(*arguments: str) -> Result:
    app = typer.Typer()
    app.command()(bench_cli.run)
    requests = ["--requests", "4"] if "--concurrency" in arguments else []
    return CliRunner().invoke(app, [*arguments, *requests, "--seeds", "2", "--max-lag-ms", "60000"])


async def bench(*arguments: str) -> Result:
    return await asyncio.to_thread(command, *arguments)


async def test_two_servers_get_the_same_prompts(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    a, b = OpenAiServer(ANSWER), OpenAiServer([token("a"), {"error": {"message": "out\x1b[2Jch"}}])
    async with serving(a), serving(b):
        result = await bench(
            *(a.url, "--compare", f"{b.url}/v1", "--concurrency", "2", "--json", str(file)),
            *("--extra-body", '{"top_k": 1}', "--api-key", "secret"),
            *("--compare-api-key", "other"),
        )
    assert result.exit_code == 1, result.output
    assert "4 of 4" not in result.output
    assert "8 of 8" in result.output
    assert "out␛[2Jch" in result.output
    assert prompts(a) == prompts(b)
    assert len(prompts(a)) == 10  # of two seeds, and two for the warm-up
    assert a.asked[0] == {
        "model": "tiny",
        "prompt": a.asked[0]["prompt"],
        "max_tokens": 64,
        "temperature": 0,
        "top_k": 1,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert set(a.keys) == {"Bearer secret"}
    assert set(b.keys) == {"Bearer other"}
    found = json.loads(file.read_text())
    assert "secret" not in file.read_text()
    assert found["trusted"] is True
    assert [(each["target"], each["load"]) for each in found["loads"]] == [
        (a.url, "2 clients"),
        (f"{b.url}/v1", "2 clients"),
    ]
    good, bad = found["loads"]
    assert good["summary"]["requests"] == 8
    assert {seed: each["requests"] for seed, each in good["seeds"].items()} == {"1": 4, "2": 4}
    assert bad["summary"]["ttft_ms_p50"] is None


def prompts(server: OpenAiServer) -> set[tuple[int, ...]]:
    return {tuple(body["prompt"]) for body in server.asked}


async def test_a_slow_generator_is_not_trusted() -> None:
    """No generator sends its requests at the very time they are due."""
    async with serving(OpenAiServer(ANSWER)) as server:
        options: dict[str, Any] = {"rate": [50.0], "seconds": 0.2, "seeds": 1, "max_lag_ms": 0.0}
        with pytest.raises(typer.Exit) as caught:
            await asyncio.to_thread(bench_cli.run, server.url, **options)
    assert caught.value.exit_code == 3


@pytest.mark.parametrize(("late", "told"), [(0.0149, False), (0.080, True)])
def test_a_delay_that_explains_a_long_gap_is_told(late: float, told: bool) -> None:
    summary = summarise(Run([RequestTimes(first=0.1, tokens=1)], 1.0, [late]), Limits())
    out = io.StringIO()
    measured = MeasuredLoad("a", "4/s", summary, {}, [], [], [], [])
    assert bench_cli.show([measured], 15.0, Console(file=out, width=200)) == 0
    assert ("a, 4/s: up to 80.0 ms of the longest gaps are delays of this program" in out.getvalue()) is told


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--rate", "1", "--concurrency", "1"), "different loads: use one of them"),
        (("--trace", "/nothing.jsonl"), "/nothing.jsonl: cannot be read"),
        (("--compare", "http://127.0.0.1:1/v1/"), "names the same server"),
        (("--prefixes", "2", "--prefix-tokens", "512"), "prefix of 512 tokens must be shorter"),
        (("--extra-body", "[]"), "--extra-body: is not a JSON object"),
        (("--json", "/none/result.json"), "there is no folder /none"),
        (("--json", "/tmp"), "/tmp: is a folder, not a file"),
        (("--requests", "9"), "--requests: belongs to --concurrency"),
        (("--concurrency", "1", "--seconds", "9"), "--seconds: has no effect with --concurrency"),
        (("--speed", "2"), "--speed: belongs to --trace"),
        (("--length-scale", "0.5"), "--length-scale: belongs to --trace"),
        (("--max-input", "5"), "--max-input: belongs to --trace"),
        (("--trace", "/nothing.jsonl", "--prefixes", "2"), "--prefixes: has no effect with --trace"),
        (("--prefix-tokens", "16"), "--prefix-tokens: belongs to --prefixes"),
        (("--compare-api-key", "x"), "--compare-api-key: belongs to --compare"),
        (("--compare", "localhost:8000"), "localhost:8000: is not an http or https URL"),
        (("--share", "0.9"), "--share: belongs to --search"),
        (("--max-probes", "3"), "--max-probes: belongs to --search"),
        (("--search", "--concurrency", "1"), "--concurrency and --trace are other loads"),
        (("--search", "--rate", "1", "--rate", "2"), "--rate: is the first rate of a search: give only one"),
        (("--search", "--rate", "1", "--min-rate", "2"), "--rate: a search cannot begin with 1/s"),
        (("--search", "--min-rate", "9", "--max-rate", "8"), "--min-rate: 9/s is above --max-rate, 8/s"),
        (("--search", "--share", "99"), "--share: 99 is not a share"),
        (("--search", "--extra-body", '{"max_tokens": 9}'), "contains max_tokens"),
        ((), "Is the server running?"),
    ],
)
def test_what_cannot_be_measured_is_refused(arguments: tuple[str, ...], said: str) -> None:
    result = command("http://127.0.0.1:1", *arguments)
    assert result.exit_code == 2
    assert said in result.output


@pytest.mark.parametrize(("status", "code"), [(400, 2), (429, 1), (503, 1)])
async def test_a_server_that_calls_the_warm_up_invalid_is_not_measured(status: int, code: int) -> None:
    """Every request that counts would fail as well. One that is busy may have room later."""
    server = OpenAiServer(status=status)
    async with serving(server):
        result = await bench(server.url, "--concurrency", "2")
    assert result.exit_code == code
    said = f"{server.url}: refuses every request of the warm-up: status 400: too busy"
    assert (said in " ".join(result.output.split())) is (status == 400)
    assert len(prompts(server)) == (2 if status == 400 else 10)


async def test_a_search_reports_every_probe(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    a, b = OpenAiServer(ANSWER), OpenAiServer(status=503)
    async with serving(a), serving(b):
        result = await bench(
            *(a.url, "--compare", b.url, "--search", "--seconds", "0.4", "--rate", "20", "--min-rate", "20"),
            *("--max-rate", "40", "--ttft-ms", "60000", "--gap-ms", "60000", "--json", str(file)),
        )
    assert result.exit_code == 1, result.output
    lines = result.output.splitlines()
    assert "99 % of requests have their first token within 60000 ms" in lines[0]
    assert lines[1].startswith(f"probe 1, {a.url}, 20/s: kept, 100 % of ")
    assert lines[2].startswith(f"probe 2, {a.url}, 40/s: kept, 100 % of ")
    assert lines[3].startswith(f"{a.url}: 99 % of requests kept both limits even at 40/s, the highest rate")
    assert "a request before the first probe failed: status 503" in lines[4]
    found = json.loads(file.read_text())
    planned = sum(each["planned"] for each in found["probes"])
    assert len(prompts(a)) == planned + 2, "probes share no prompt, with each other or with the warm-up"
    assert found["trusted"] is True
    assert found["options"]["search"]["share"] == 0.99
    assert [(each["rate"], each["outcome"]) for each in found["results"]] == [
        (40, "kept at the highest rate"),
        (None, "every request failed"),
    ]
    assert [each["rate"] for each in found["probes"]] == [20, 40]
    assert [set(each["share_by_seed"]) for each in found["probes"]] == [{"1", "2"}, {"1", "2"}]
    assert found["probes"][1]["measured"]["summary"]["requests"] == found["probes"][1]["planned"]


def test_a_share_of_good_requests_is_rounded_down() -> None:
    """A table that says 100 % has no request outside the limits."""
    good, late = RequestTimes(first=0.1, tokens=1), RequestTimes(first=9.0, tokens=1)
    summary = summarise(Run([*[good] * 399, late], 1.0), Limits())
    out = io.StringIO()
    bench_cli.show(
        [MeasuredLoad("a", "4/s", summary, {}, [], [], [], [])], 15.0, Console(file=out, width=200)
    )
    assert "99.75 %" in out.getvalue()


@pytest.mark.parametrize(
    ("share", "text"), [(1, "100"), (0.98999, "98.99"), (0.989999, "98.99"), (0.29, "29")]
)
def test_percents_are_rounded_down(share: float, text: str) -> None:
    assert percent(share) == text


def test_the_default_vocabulary_fits_every_tiny_model() -> None:
    """Ids outside a vocabulary are refused, so that every request of a first try would fail."""
    configs = [json.loads(file.read_text()) for file in (ROOT / "deploy/tiny_models").glob("*/config.json")]
    sizes = [(config.get("text_config") or config)["vocab_size"] for config in configs]
    assert inspect.signature(bench_cli.run).parameters["vocabulary"].default <= min(sizes)
