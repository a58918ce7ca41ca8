"""deploy/top: percentiles and rates between two readings, the picture, and how it ends."""

from __future__ import annotations

import asyncio
import io
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from aiohttp import web
from aiohttp.test_utils import TestServer
from rich.console import Console, RenderableType
from typer.testing import CliRunner

from common.errors import ConfigError
from common.process_entry import entry
from deploy import top_cli
from deploy.cluster_sample import Buckets, ClusterSample, node_rates, read_sample
from deploy.process_table import ProcessRecord, Table
from deploy.top_view import render
from tests.fakes.waiting import PATIENCE

INF = math.inf
TINY_TARGET = Path(__file__).parents[3] / "deploy" / "tiny_models" / "tiny-target"


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for servers of this process, which may be kept from running, longer than for a network."""
    monkeypatch.setattr(top_cli, "ANSWER_SECONDS", PATIENCE)


def counters(**changed: Any) -> dict[str, Any]:
    graphs = [{"replays": 90, "fallbacks": {"too_long": 10}}, {"replays": 0, "fallbacks": {}}]
    return {
        "prompt_tokens": 1000,
        "cached_tokens": 200,
        "generated_tokens": 500,
        "spec_drafts": 100,
        "spec_accepted_tokens": 250,
        "graphs": graphs,
    } | changed


def node(name: str, **changed: Any) -> dict[str, Any]:
    load = {"running": 3, "queued": 2, "transferring": 1, "free_pages": 60, "cached_pages": 15}
    role = name.partition("-")[0]
    whole = {"name": name, "role": role, "state": "up", "load": load | {"total_pages": 100}, "ranks": []}
    return whole | {"counters": counters()} | changed


def sample(at: float, *nodes: dict[str, Any], first: Buckets | None = None, **info: Any) -> ClusterSample:
    whole = {"served_model_name": "tiny", "ready": True, "active_requests": 7, "nodes": list(nodes), **info}
    return ClusterSample(at, whole, first or Buckets({}), Buckets({}), 2)


def shown(picture: RenderableType, width: int = 160) -> str:
    out = Console(file=io.StringIO(), width=width)
    out.print(picture)
    assert isinstance(out.file, io.StringIO)
    return out.file.getvalue()


# -- histograms --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("share", "seconds"), [(0.25, 0.05), (0.5, 0.1), (0.75, 0.15), (1.0, 0.2), (0.05, 0.01), (0.0, 0.0)]
)
def test_quantiles_are_interpolated_within_their_bucket(share: float, seconds: float) -> None:
    assert Buckets({0.1: 10, 0.2: 20, INF: 20}).quantile(share) == pytest.approx(seconds)


def test_quantiles_above_the_last_bound_are_that_bound() -> None:
    assert Buckets({0.1: 1, INF: 10}).quantile(0.99) == 0.1
    assert math.isnan(Buckets({0.1: 0, INF: 0}).quantile(0.5))
    assert math.isnan(Buckets({}).quantile(0.5))


def test_a_window_has_what_was_observed_since() -> None:
    before, now = Buckets({0.1: 5, INF: 6}), Buckets({0.1: 5, INF: 9})
    assert now.since(before).counts == {0.1: 0, INF: 3}
    assert before.since(now) == before, "after a restart all of it is new"


METRICS = b"""# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{le="0.1",engine="router"} 4.0
vllm:time_to_first_token_seconds_bucket{le="+Inf",engine="router"} 5.0
vllm:inter_token_latency_seconds_bucket{le="0.01",engine="decode-0"} 4.0
vllm:inter_token_latency_seconds_bucket{le="0.01",engine="decode-1"} 2.0
vllm:inter_token_latency_seconds_bucket{le="+Inf",engine="decode-0"} 4.0
vllm:inter_token_latency_seconds_bucket{le="+Inf",engine="decode-1"} 3.0
tandem_requests_waiting_for_room 3.0
other{x="1"} broken
"""


def answers(info: Any, metrics: bytes = METRICS) -> Callable[[str], bytes]:
    return {"/server_info": json.dumps(info).encode(), "/metrics": metrics}.__getitem__


def test_samples_sum_histograms_over_nodes() -> None:
    found = read_sample(answers({"nodes": [node("decode-0")]}), 5.0)
    assert found.first_tokens.counts == {0.1: 4, INF: 5}
    assert found.gaps.counts == {0.01: 6, INF: 7}
    assert found.waiting_for_room == 3
    assert found.at == 5.0


@pytest.mark.parametrize("info", [[], {}, {"nodes": [{"name": "decode-0"}]}])
def test_answers_of_other_servers_and_for_lesser_keys_are_refused(info: Any) -> None:
    with pytest.raises(ValueError, match="/server_info"):
        read_sample(answers(info), 0.0)


# -- rates -------------------------------------------------------------------------------------------------------


def test_rates_are_those_between_two_reports() -> None:
    graphs = [{"replays": 150, "fallbacks": {"too_long": 30}}]
    later = counters(
        prompt_tokens=1900,
        cached_tokens=300,
        generated_tokens=900,
        spec_drafts=120,
        spec_accepted_tokens=310,
        graphs=graphs,
    )
    found = node_rates(node("decode-0", counters=later), node("decode-0"), 4.0)
    assert (found.tokens_per_s, found.accept_length, found.graph_share) == (100, 4.0, 0.75)
    found = node_rates(node("prefill-0", counters=later), node("prefill-0"), 4.0)
    assert (found.tokens_per_s, found.accept_length) == (200, None)


def test_without_an_earlier_report_or_work_they_are_those_since_the_start() -> None:
    for before in (None, node("decode-0")):
        found = node_rates(node("decode-0"), before, 1.0)
        assert (found.accept_length, found.graph_share) == (3.5, 0.9)
        assert found.tokens_per_s == (None if before is None else 0)


def test_a_restarted_node_has_no_rate() -> None:
    before = node("decode-0", counters=counters(generated_tokens=900))
    assert node_rates(node("decode-0"), before, 1.0).tokens_per_s is None


def test_nodes_without_drafts_and_graphs_show_none() -> None:
    idle = counters(spec_drafts=0, spec_accepted_tokens=0, graphs=[])
    found = node_rates(node("decode-0", counters=idle), None, 1.0)
    assert (found.accept_length, found.graph_share) == (None, None)


# -- the picture -------------------------------------------------------------------------------------------------


def test_each_node_has_a_row() -> None:
    ranks = [{"device": f"cuda:{rank}", "memory_bytes": 3 << 30, "behind": rank} for rank in range(2)]
    later = node("decode-0", counters=counters(generated_tokens=1500), ranks=ranks, state="draining")
    first = Buckets({0.1: 10, 0.2: 20, INF: 20})
    samples = [
        sample(1.0, node("decode-0"), node("prefill-0"), first=Buckets({0.1: 0, 0.2: 0, INF: 0})),
        sample(3.0, later, node("prefill-0"), first=first),
    ]
    lines = [" ".join(line.replace("│", " ").split()) for line in shown(render(samples, None)).splitlines()]
    assert lines[0] == "tiny: ready; 7 requests, 2 of them waiting for room; 500 tokens/s"
    assert lines[1] == "p50 / p90 / p99: first token 100 / 180 / 198 ms; gap -"
    rows = [line for line in lines if line.startswith(("prefill", "decode"))]
    assert rows[0] == "prefill-0 prefill up 3 2 1 75 / 100 25% 0 - 90%"
    assert rows[1] == "decode-0 decode draining 3 2 1 75 / 100 25% 500 3.50 90%"
    assert rows[2] == "decode-0/0 cuda:0, 3.0 GiB"
    assert rows[3] == "decode-0/1 cuda:1, 3.0 GiB, 1 plans behind"


@pytest.mark.parametrize(
    ("width", "left_out"),
    [
        (120, []),
        (112, ["pages free / all"]),
        (80, ["pages free / all", "graphs"]),
        (70, ["accept", "graphs"]),
    ],
)
def test_a_narrow_terminal_gets_fewer_columns_and_whole_words(width: int, left_out: list[str]) -> None:
    picture = shown(render([sample(0.0, node("prefill-0"), node("decode-0"))], None), width)
    table = picture[picture.index("\u250f") :]
    assert [name for name in left_out if name in table] == []
    assert all(word in table for word in ("prefill-0", "decode-0", "running", "queued", "used", "tokens/s"))
    assert "\u2026" not in table
    assert max(map(len, picture.splitlines())) <= width


def test_without_new_observations_percentiles_are_those_since_the_start() -> None:
    one = sample(1.0, first=Buckets({0.1: 10, INF: 10}))
    assert "first token 50 / 90 / 99 ms since the start" in shown(render([one], None))
    assert "first token 50 / 90 / 99 ms since the start" in shown(render([one, one], None))
    slow = sample(1.0, first=Buckets({2.0: 10, INF: 10}))
    assert "first token 1,000 / 1,800 / 1,980 ms since the start" in shown(render([slow], None))


def test_nodes_that_are_not_there_are_shown() -> None:
    missing = [{"name": "decode-[1", "role": "decode"}]
    assert "decode-[1" in shown(render([sample(1.0, missing_nodes=missing)], None))
    own = entry(os.getpid())
    gone = ProcessRecord(pid=own.pid, started=own.started, state="backing off", restart_at=0.0, restarts=4)
    up = ProcessRecord(pid=own.pid, started=own.started, state="up")
    table = Table(
        supervisor=own,
        cluster="",
        url="",
        state="ready",
        processes={"router": up, "decode-0": gone, "decode-1": up},
    )
    text = shown(render([sample(1.0, node("decode-1"))], table))
    assert "down, restarts in 0 s" in text
    assert "router" not in text


# -- the command -------------------------------------------------------------------------------------------------


def test_it_goes_on_without_an_answer_and_ends_when_told() -> None:
    asked = []

    def fetch(path: str) -> bytes:
        asked.append(path)
        if len(asked) in (1, 4):
            raise ConnectionRefusedError("refused\x1b")
        return answers({"nodes": [node("decode-0")], "ready": True})(path)

    waits = iter([False, False, True])
    pictures = [shown(each) for each in top_cli.watch(fetch, lambda: None, lambda seconds: next(waits))]
    assert len(pictures) == 3
    assert "the router does not answer: refused␛" in pictures[0]
    assert "decode-0" in pictures[1]
    assert "does not answer" in pictures[2]
    assert "decode-0" in pictures[2]


def test_a_key_that_arrives_with_others_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    keyboard, terminal = os.openpty()
    with open(keyboard, "wb", buffering=0) as keys, open(terminal, "rb+", buffering=0) as inner:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(inner))
        with top_cli.key_pressed() as wait:
            keys.write(b"xq")
            assert wait(PATIENCE)


def command(*arguments: str) -> tuple[int, str]:
    app = typer.Typer()
    app.command()(top_cli.run)
    result = CliRunner().invoke(app, arguments)
    return result.exit_code, result.output


def test_without_a_terminal_it_prints_one_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    fetch = answers({"nodes": [node("decode-0")], "ready": True})
    monkeypatch.setattr(top_cli, "source", lambda target, key, values: (fetch, lambda: None))
    monkeypatch.setattr(top_cli, "REFRESH_SECONDS", 0.0)
    code, text = command("http://example.test")
    assert code == 0
    assert "decode-0" in text


@pytest.mark.parametrize(
    ("target", "code", "said"),
    [
        ("http://127.0.0.1:1", 1, "does not answer"),
        ("ftp://127.0.0.1", 2, "is not an http or https URL"),
        ("127.0.0.1:8000", 2, "or a URL that begins with http://"),
        ("/none.yaml", 2, "/none.yaml"),
        ("/none", 2, "/none: no such file or directory"),
    ],
)
def test_targets_that_cannot_be_read(target: str, code: int, said: str) -> None:
    found, text = command(target)
    assert found == code
    assert said in text


def test_a_cluster_that_was_never_started_is_said_to_be_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    code, text = command(str(TINY_TARGET))
    assert code == 1
    assert f"does not answer: deploy/up {TINY_TARGET} has not been run" in text
    file = tmp_path / "my.yaml"
    file.write_text(f"model: {{path: {TINY_TARGET}}}\nprocess: {{run_dir: {tmp_path}/run}}\n")
    code, text = command(str(file))
    assert code == 1
    assert f"does not answer: nothing listens at {tmp_path}/run/router.admin.sock" in text


def test_it_takes_the_keys_with_which_the_cluster_was_started(tmp_path: Path) -> None:
    file = tmp_path / "my.yaml"
    file.write_text(f"model: {{path: {TINY_TARGET}}}\n")
    code, text = command(str(file), "--set", f"process.run_dir={tmp_path}/other", "--port", "8001")
    assert code == 1
    assert f"does not answer: nothing listens at {tmp_path}/other/router.admin.sock" in text
    code, text = command("http://127.0.0.1:1", "--set", "router.port=8001")
    assert code == 2
    assert "--set and --port apply to a cluster file or a model" in text


async def test_a_key_without_the_scope_is_refused() -> None:
    keys = []

    async def refuse(request: web.Request) -> web.Response:
        keys.append(request.headers["Authorization"])
        return web.Response(status=403)

    app = web.Application()
    app.router.add_get("/server_info", refuse)
    async with TestServer(app) as server:
        url = str(server.make_url("/v1/"))
        with pytest.raises(ConfigError, match="/server_info was answered 403: it needs the scope admin"):
            await asyncio.to_thread(top_cli.over_http, url, "k", "/server_info")
    assert keys == ["Bearer k"]


async def test_a_server_without_the_path_is_no_router() -> None:
    """It does answer, so that nobody looks for a router that is down."""
    async with TestServer(web.Application()) as server:
        url = str(server.make_url(""))
        with pytest.raises(ConfigError, match="answered 404 to /server_info: is it a tandem router"):
            await asyncio.to_thread(top_cli.over_http, url, None, "/server_info")
