"""A request that loses a node halfway is answered as if nothing had happened, whatever it requested.

Text, tokens, logprobs, top logprobs, finish reason and usage are compared, of complete and streamed answers. The
prefill node dies in the middle of prompts. The decode node dies after exactly the number of tokens that the case names,
because it withholds the others (tests/fakes/withholding_node.py). Prefixes are not cached, so earlier tokens are
recomputed in chunks and batches of other shapes. Logprobs may therefore differ by rounding: by 2.5e-5 between two
undisturbed answers, by 4.2e-5 after a death; LOGPROB_TOLERANCE is larger. Everything else is equal.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from deploy.eval_cli import picture_body
from deploy.tiny_models.vision.questions import questions
from deploy.tiny_models.word_problems import take
from tests.cluster.continuation import Case, ask, expect_equal
from tests.cluster.harness import MODEL, Client, RunningCluster
from tests.fakes.waiting import PATIENCE

pytestmark = pytest.mark.timeout(900)  # two busy cores

GREEDY = {"temperature": 0}
RANDOM = {"temperature": 0.9, "seed": 5}
FEATURES: dict[str, tuple[int, dict[str, Any]]] = {
    "greedy": (9, GREEDY),
    "seed": (10, RANDOM),
    "first-token-only": (1, RANDOM),
    "last-token-missing": (39, {"top_p": 0.9, "top_k": 30, **RANDOM}),
    "repetition": (12, {"repetition_penalty": 1.3, **GREEDY}),
    "presence": (7, {"presence_penalty": 1.5, **RANDOM}),
    "frequency": (17, {"frequency_penalty": 0.8, **GREEDY}),
    "bias": (8, {"logit_bias": {"260": 4, "300": -100, "17": 2.5}, **RANDOM}),
    "min_tokens": (11, {"min_tokens": 30, "stop_token_ids": list(range(250, 378)), **RANDOM}),
    "late-stop": (13, {"min_tokens": 25, "stop": ["e", " 1"], **GREEDY}),
    "everything": (
        14,
        {
            "repetition_penalty": 1.1,
            "presence_penalty": 0.2,
            "frequency_penalty": 0.1,
            "logit_bias": {"260": 1, "300": -2},
            "min_tokens": 20,
            "min_p": 0.02,
            **RANDOM,
        },
    ),
}
SHARED = {"max_tokens": 40, "ignore_eos": True}
NO_CACHE = {"prefix_cache": False}


def text_cases() -> list[Case]:
    problem = take(1, 31, "heldout")[0].question
    prompt = {"prompt": f"Question: {problem}\nAnswer:", "logprobs": 3}
    chat = {
        "messages": [{"role": "user", "content": problem}],
        "logprobs": True,
        "top_logprobs": 4,
    }
    found = [
        Case(name, "completions", {**SHARED, **prompt, **fields}, tokens)
        for name, (tokens, fields) in FEATURES.items()
    ]
    return [*found, Case("chat", "chat/completions", {**SHARED, **chat, **RANDOM}, 6)]


def straddling(case: Case, wanted: dict[str, Any]) -> list[Case]:
    """Return the case with stop strings of which the router has received a part when the node dies."""
    tokens, said = wanted["logprobs"]["tokens"], case.tokens
    made = []
    for name, before, behind in (("half", 3, 3), ("all-but-last", 6, 1), ("first-only", 1, 6)):
        stop = "".join(tokens[said - before : said + behind])
        assert wanted["text"].index(stop) == len("".join(tokens[: said - before])), (
            "the stop string occurs only once"
        )
        made.append(Case(f"stop-{name}", case.path, {**case.body, "stop": [stop]}, said))
    included = {**made[0].body, "include_stop_str_in_output": True}
    return [*made, Case("stop-included", case.path, included, case.tokens)]


def picture_cases() -> list[Case]:
    """Return requests with one and two pictures, greedy and sampled."""
    shown = {len(each.images): each for each in islice(questions(12, "heldout"), 16)}
    assert {1, 2} <= set(shown)
    features: dict[str, dict[str, Any]] = {
        "greedy": GREEDY,
        "seed": RANDOM,
        "penalty": {"repetition_penalty": 1.3},
    }
    listed = {"logprobs": True, "top_logprobs": 2, "max_tokens": 24, "ignore_eos": True}
    return [
        Case(f"{pictures}-{name}", "chat/completions", {**picture_body(question), **listed, **fields}, 5)
        for pictures, question in shown.items()
        for name, fields in features.items()
    ]


async def answers(client: Client, cases: list[Case], prefix: str = "") -> dict[str, dict[str, Any]]:
    """Return answers by request id without `prefix`, which may encode the number of tokens the router receives."""

    async def one(case: Case, stream: bool) -> tuple[str, dict[str, Any]]:
        name = f"{case.name}-{'stream' if stream else 'whole'}"
        return name, await ask(client, case, stream, prefix.format(case.tokens) + name)

    return dict(await asyncio.gather(*(one(case, stream) for case in cases for stream in (False, True))))


def placed_again(cluster: RunningCluster, prefix: str) -> dict[str, int]:
    """Return how many tokens each request with this id prefix had emitted when it was placed again."""
    lines = [
        json.loads(line) for line in cluster.log("router").splitlines() if '"placing a request again"' in line
    ]
    return {line["request_id"]: line["tokens"] for line in lines if line["request_id"].startswith(prefix)}


@pytest.mark.parametrize("model", ["tiny-target", "tiny-vision"])
async def test_the_death_of_a_node_changes_no_answer(model: str, tmp_path: Path) -> None:
    draft = str(MODEL.parent / ("tiny-eagle3" if model == "tiny-target" else "tiny-vision-eagle3"))
    config = {
        "model": {"path": str(MODEL.parent / model), "served_name": "tiny"},
        "speculation": {"algorithm": "eagle3", "draft_model_path": draft, "steps": 4},
        "prefill": {
            "nodes": [{"name": "prefill-0"}, {"name": "prefill-1"}],
            "chunk_tokens": 16,
            **NO_CACHE,
        },
        "decode": {"nodes": [{"name": "decode-0"}, {"name": "decode-1"}], **NO_CACHE},
        "kv": {"page_size": 4},
    }
    spares = ("prefill-1", "decode-1")
    cluster = RunningCluster(
        tmp_path, 2, 2, config, blocking=("prefill-0",), withholding=("decode-0",), late=spares
    )
    async with cluster, Client(cluster.url) as client:
        cases = text_cases() if model == "tiny-target" else picture_cases()
        if model == "tiny-target":
            seen = await ask(client, cases[0], stream=False)
            cases += straddling(cases[0], seen)
        wanted = await answers(client, cases)
        rounding = []
        for case in cases:
            rounding.append(expect_equal(wanted[f"{case.name}-stream"], wanted[f"{case.name}-whole"]))
            said = wanted[f"{case.name}-whole"]["usage"]["completion_tokens"]
            assert said > case.tokens, f"{case.name} ends before its node dies"
        await client.wait_idle()
        rounding = [
            max(rounding),
            await _kill_prefill(cluster, client, cases, wanted),
            await _kill_decode(cluster, client, cases, wanted),
        ]
        print("largest difference of a logprob:", rounding)
        await client.wait_idle()


async def _kill_prefill(
    cluster: RunningCluster, client: Client, cases: list[Case], wanted: dict[str, dict[str, Any]]
) -> float:
    """Kill the prefill node in the middle of prompts, after some chunks."""
    cluster.block("prefill-0", after=5)
    asking = asyncio.create_task(answers(client, cases, "prefill-"))
    await _until(lambda: cluster.is_blocked("prefill-0"), asking)
    found = await _replaced(cluster, "prefill-0", "prefill-1", asking)
    again = placed_again(cluster, "prefill-")
    assert 0 in again.values()
    assert len(again) >= len(cases), "most had not been handed over"
    return max(expect_equal(found[name], wanted[name]) for name in wanted)


async def _kill_decode(
    cluster: RunningCluster, client: Client, cases: list[Case], wanted: dict[str, dict[str, Any]]
) -> float:
    """Kill the decode node after exactly as many tokens as each case names."""
    asking = asyncio.create_task(answers(client, cases, "hold-{}-"))
    await _until(lambda: len(cluster.withheld("decode-0")) == len(wanted), asking)
    found = await _replaced(cluster, "decode-0", "decode-1", asking)
    expected = {f"hold-{case.tokens}-{case.name}": case.tokens for case in cases}
    assert placed_again(cluster, "hold-") == {
        f"{name}-{form}": tokens for name, tokens in expected.items() for form in ("whole", "stream")
    }
    return max(expect_equal(found[name], wanted[name]) for name in wanted)


async def _replaced(
    cluster: RunningCluster, victim: str, spare: str, asking: asyncio.Task[dict[str, dict[str, Any]]]
) -> dict[str, dict[str, Any]]:
    """Return the answers of a run in which `victim` is killed while `spare` is up."""
    cluster.launch(spare)
    await cluster.wait_nodes(expect=[spare])
    assert not asking.done()
    cluster.kill(victim)
    del cluster.processes[victim]
    return await asyncio.wait_for(asking, 4 * PATIENCE)


async def _until(reached: Callable[[], bool], asking: asyncio.Task[dict[str, dict[str, Any]]]) -> None:
    async with asyncio.timeout(2 * PATIENCE):
        while not reached():
            if asking.done():
                asking.result()
                raise AssertionError("all answers came before the node was stopped")
            await asyncio.sleep(0.02)
