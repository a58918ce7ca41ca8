"""The measurements of decode_tier.sh, and what it expects of them. These tests need no GPU."""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from tests.gpu import conversations, expect, trace_kernels

PROMPTS = 1000


def tier_report(
    received: tuple[int, int] = (1000, 10), hits: tuple[int, int] = (0, 960), **wrong: float
) -> dict[str, Any]:
    """Counters of two rounds, by what they gained in each."""

    def after(rounds: int) -> dict[str, Any]:
        own = {"hits": 50 + sum(hits[:rounds]), "received": 7 + sum(received[:rounds]), "missing_marks": 0}
        return {"decode-0": own, "prefill-0": {"hits": 0, "checksum_failures": 0, **wrong}}

    return {
        "prompt_tokens": PROMPTS,
        "before": after(0),
        "rounds": [{"first_ms": [1.0], "after": after(1)}, {"first_ms": [1.0], "after": after(2)}],
    }


def no_engine() -> dict[str, Any]:
    report = tier_report()
    del report["rounds"][1]["after"]["decode-0"]
    return report


@pytest.mark.parametrize(
    ("report", "problem"),
    [
        (tier_report(), ""),
        (
            tier_report(hits=(0, 899)),
            "decode-0 found 899 of 1000 prompt tokens in host memory in the last round",
        ),
        (tier_report(hits=(960, 0)), "decode-0 found 0 of 1000"),
        (tier_report(received=(1000, 51)), "decode-0 received 51 of 1000 prompt tokens in the last round"),
        (tier_report(received=(500, 0)), "decode-0 received 500 of 1000 prompt tokens in the first round"),
        (tier_report(checksum_failures=1), "prefill-0: checksum_failures is 1"),
        (tier_report(missing_marks=2), "prefill-0: missing_marks is 2"),
        (no_engine(), "cannot be checked: KeyError('decode-0')"),
    ],
)
def test_what_is_expected_of_the_tier(
    report: dict[str, Any], problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "tier.json"
    file.write_text(json.dumps(report))
    assert expect.main(["tier", str(file), "decode-0"]) == bool(problem)
    said = capsys.readouterr().out
    assert said.count("\n") == bool(problem)
    assert problem in said


def metrics(rounds: int) -> str:
    rows = {
        'tandem_host_tier_hits_total{engine="decode-0",model_name="m"}': 600 * (rounds // 2),
        'tandem_host_tier_hits_total{engine="prefill-0",model_name="m"}': 0,
        'vllm:external_prefix_cache_hits_total{engine="decode-0",model_name="m"}': 400 * rounds,
        'vllm:num_preemptions_total{engine="decode-0",model_name="m"}': 9,
    }
    families = sorted({name.partition("_total")[0] for name in rows})
    return "".join(
        f"# TYPE {family}_total counter\n"
        + "".join(f"{name} {value}\n" for name, value in rows.items() if name.startswith(f"{family}_total"))
        for family in families
    )


def test_conversations_take_turns_and_counters_are_read_between_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversations, "QUIET_SECONDS", 0.01)
    asked = list[dict[str, Any]]()

    async def complete(request: web.Request) -> web.StreamResponse:
        asked.append(await request.json())
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for event in ("a", "b"):
            chunk = {"choices": [{"text": event, "finish_reason": None if event == "a" else "length"}]}
            await response.write(f"data: {json.dumps(chunk)}\n\n".encode())
        usage = {"choices": [], "usage": {"completion_tokens": 4}}
        await response.write(f"data: {json.dumps(usage)}\n\ndata: [DONE]\n\n".encode())
        return response

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m"}]})

    async def read(request: web.Request) -> web.Response:
        return web.Response(text=metrics(len(asked) // 3))

    async def run() -> dict[str, Any]:
        app = web.Application()
        app.add_routes(
            [web.post("/v1/completions", complete), web.get("/v1/models", models), web.get("/metrics", read)]
        )
        async with TestServer(app) as server:
            given = {"count": 3, "tokens": 40, "answer": 4, "rounds": 2, "vocab": 90}
            return await conversations.measure(argparse.Namespace(url=str(server.make_url("")), **given))

    report = asyncio.run(run())
    prompts = [each["prompt"] for each in asked]
    assert prompts[:3] == prompts[3:]
    assert len({tuple(each) for each in prompts}) == 3
    assert {len(each) for each in prompts} == {36}
    assert report["prompt_tokens"] == 3 * 36
    assert [len(each["first_ms"]) for each in report["rounds"]] == [3, 3]
    gained = [report["before"], *(each["after"] for each in report["rounds"])]
    assert [each["decode-0"] for each in gained] == [
        {"hits": 0, "received": 0},
        {"hits": 0, "received": 400},
        {"hits": 600, "received": 800},
    ]


def test_what_a_round_has_gained() -> None:
    before = {"decode-0": {"hits": 5.0}}
    after = {"decode-0": {"hits": 7.0, "stores": 1.0}, "prefill-0": {"hits": 3.0}}
    assert conversations.gains(before, after) == {
        "decode-0": {"hits": 2, "stores": 1},
        "prefill-0": {"hits": 3},
    }


def kernel(name: str, micros: float) -> dict[str, Any]:
    return {"ph": "X", "cat": "kernel", "name": name, "dur": micros}


@pytest.mark.parametrize("found", [True, False])
def test_the_kernels_of_a_trace(found: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events: list[dict[str, Any]] = [{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "dur": 900}, {"ph": "M"}]
    if found:
        events += [kernel(f"small{n}", 1) for n in range(30)] + [kernel("gemm", 500), kernel("gemm", 250)]
    trace, answer, summary = (tmp_path / name for name in ("a.trace.json.gz", "answer.json", "summary.json"))
    with gzip.open(trace, "wt") as file:
        json.dump({"traceEvents": events}, file)
    answer.write_text(json.dumps({"name": "decode-0", "path": str(trace), "seconds": 1.0, "num_steps": 40}))
    trace_kernels.main([str(answer), str(summary)])
    told = json.loads(summary.read_text())
    assert told["bytes"] == trace.stat().st_size
    assert told["events"] == len(events)
    assert expect.main(["kernels", str(summary)]) == (not found)
    if found:
        assert (told["kernels"], told["kernel_ms"]) == (32, 0.78)
        assert told["top"][0] == {"ms": 0.75, "calls": 2, "name": "gemm"}
        assert len(told["top"]) == 20
    else:
        assert f"no CUDA kernel among the 2 events of {trace}" in capsys.readouterr().out
