"""/metrics of a real cluster: what published boards query exists, and a request is counted once."""

from __future__ import annotations

import asyncio
import gzip
import json
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.cluster.harness import Answer, Client, RunningCluster
from tests.fakes.collector import Batches, collector, spans_in
from tests.fakes.waiting import PATIENCE

pytestmark = pytest.mark.timeout(900)

# The prefill node's report of a short answer may come after its end, and is not counted then.
ATTEMPTS = 10
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
BOARDS = Path(__file__).with_name("board_series.json")


class Board(msgspec.Struct):
    """One published Grafana board: where it was read, and the series that it queries."""

    board: str
    commit: str
    series: list[str]


def boards() -> list[Board]:
    return msgspec.convert(msgspec.json.decode(BOARDS.read_bytes())["boards"], list[Board])


async def totals(client: Client) -> dict[str, float]:
    """Return the sum of each series over its labels."""
    found: defaultdict[str, float] = defaultdict(float)
    async with client.session.get("/metrics") as response:
        for family in text_string_to_metric_families(await response.text()):
            for sample in family.samples:
                found[sample.name] += sample.value
    return found


@pytest.fixture(scope="module")
def batches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunningCluster, Batches]]:
    """Run a cluster that sends its traces to a collector."""
    with collector() as (address, traces):
        config = {"router": {"otlp_endpoint": address}}
        with RunningCluster(tmp_path_factory.mktemp("cluster"), config=config) as running:
            yield running, traces


@pytest.fixture(scope="module")
def cluster(batches: tuple[RunningCluster, Batches]) -> RunningCluster:
    return batches[0]


async def test_a_request_is_counted_once_in_all_series_that_boards_query(cluster: RunningCluster) -> None:
    async with Client(cluster.url) as client:
        for _ in range(ATTEMPTS):
            await client.wait_idle()
            before = await totals(client)
            await client.complete([5, 6, 7, 8], 6)
            await client.wait_idle()  # what the nodes have counted was in heartbeats since then
            shown = await totals(client)
            gained = {name: value - before.get(name, 0.0) for name, value in shown.items()}
            if gained["tandem_kv_transfer_seconds_count"]:
                break
    for board in boards():
        assert set(board.series) <= set(shown), board.board
    times = ("queue", "prefill", "decode", "inference", "time_per_output_token")
    names = {f"vllm:request_{each}_time_seconds_count" for each in times[:4]}
    names |= {f"vllm:request_{times[4]}_seconds_count", "vllm:time_to_first_token_seconds_count"}
    names |= {"vllm:request_success_total", "vllm:request_params_n_count", "tandem_kv_transfer_seconds_count"}
    names |= {"tandem_kv_transfer_bytes_count"}
    assert {name: gained[name] for name in names} == dict.fromkeys(names, 1)
    assert gained["vllm:prompt_tokens_total"] == gained["vllm:request_prompt_tokens_sum"] == 4
    assert gained["vllm:generation_tokens_total"] == gained["vllm:request_generation_tokens_sum"] == 6
    assert gained["vllm:inter_token_latency_seconds_count"] == 5
    assert gained["vllm:iteration_tokens_total_sum"] == 4 + 5
    assert 0 < gained["vllm:inter_token_latency_seconds_sum"] < gained["vllm:e2e_request_latency_seconds_sum"]
    assert gained["tandem_kv_transfer_bytes_sum"] > 1000
    parts, whole = gained["tandem_stage_seconds_sum"], gained["vllm:e2e_request_latency_seconds_sum"]
    assert parts == pytest.approx(whole)


async def test_the_spans_of_a_request_add_up_to_its_time(batches: tuple[RunningCluster, Batches]) -> None:
    cluster, traces = batches
    for _ in range(ATTEMPTS):
        async with Client(cluster.url) as client:
            began = time.time_ns()
            body = {"prompt": list(range(5, 400)), "max_tokens": 40, "ignore_eos": True, "temperature": 0}
            headers = {"traceparent": PARENT, "X-Request-Id": "traced"}
            async with client.session.post("/v1/completions", json=body, headers=headers) as response:
                assert response.status == 200
                own = response.headers["traceparent"]
            ended = time.time_ns()
        found: list[Any] = []
        while not any(span.name == "router.request" for span in found):
            found += [
                span
                for span in spans_in(await asyncio.to_thread(traces.get, timeout=PATIENCE))
                if span.trace_id.hex() in PARENT
            ]
        root, *parts = found
        if any(part.name == "prefill.compute" for part in parts):
            break
    names = [
        "tokenize",
        "queue",
        "prefill.queue",
        "prefill.compute",
        "kv.transfer",
        "decode.queue",
        "decode.stream",
    ]
    assert [part.name.removeprefix("router.") for part in parts] == names
    assert own == f"00-{root.trace_id.hex()}-{root.span_id.hex()}-01"
    assert {part.parent_span_id for part in parts} == {root.span_id}
    taken = root.end_time_unix_nano - root.start_time_unix_nano
    assert sum(part.end_time_unix_nano - part.start_time_unix_nano for part in parts) > 0.99 * taken
    assert began <= root.start_time_unix_nano < root.end_time_unix_nano <= ended
    attributes = {each.key: each.value for each in root.attributes}
    assert attributes["gen_ai.request.id"].string_value == "traced"
    assert attributes["gen_ai.usage.completion_tokens"].int_value == 40


async def test_a_profile_of_a_node_under_load_shows_what_it_computes(cluster: RunningCluster) -> None:
    async with Client(cluster.url) as client, cluster.operator() as operator:
        profiled = asyncio.Event()

        async def load() -> list[Answer]:
            answers: list[Answer] = []
            while not profiled.is_set():
                answers += await client.complete_all([[5, 6, 7, 8]] * 4, 4, 400)
            return answers

        running = asyncio.create_task(load())
        body = {"seconds": PATIENCE / 2, "num_steps": 20}
        async with operator.session.post("/workers/decode-0/profile", json=body) as response:
            answer = await response.json()
            assert response.status == 200, answer
        profiled.set()
        assert all(len(each.tokens) == 400 for each in await running)
    assert (answer["name"], answer["rank"]) == ("decode-0", 0)
    assert answer["num_steps"] > 0
    path = Path(answer["path"])
    assert path.parent == cluster.run_dir / "profiles"
    with gzip.open(path) as file:
        trace = json.load(file)
    assert {"aten::mm", "aten::linear", "aten::embedding"} & {each["name"] for each in trace["traceEvents"]}
