"""Every sampling parameter through HTTP: a cluster that drafts trees answers like one that decodes plainly."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from deploy.tiny_models.word_problems import take
from tests.cluster.harness import MODEL, Client, RunningCluster

pytestmark = pytest.mark.timeout(900)

TREES = {
    "speculation": {
        "algorithm": "eagle3",
        "draft_model_path": str(MODEL.parent / "tiny-eagle3"),
        "steps": 4,
        "topk": 4,
        "draft_tokens": 12,
    },
    "kv": {"page_size": 4},
    "decode": {"read_results": "one_behind"},
}
RANDOM = {"temperature": 0.8, "seed": 5}
GREEDY = {"temperature": 0}
CASES: dict[str, dict[str, Any]] = {
    "min_p": {"min_p": 0.1, "temperature": 1.4, "seed": 5},
    "filters": {"min_p": 0.01, "top_p": 0.9, "top_k": 30, **RANDOM},
    "repetition": {"repetition_penalty": 1.3, **GREEDY},
    "presence": {"presence_penalty": 1.5, **GREEDY},
    "frequency": {"frequency_penalty": 0.8, **RANDOM},
    "bias": {"logit_bias": {"260": 4, "300": -100, "17": 2.5}, **RANDOM},
    "stops": {"stop": ["he", " 1", "so the answer"], **GREEDY},
    "stop-included": {"stop": [" 1"], "include_stop_str_in_output": True, **GREEDY},
    "late-stops": {"stop": ["he", " 1", "e"], "min_tokens": 25, **GREEDY},
    "min_tokens": {"min_tokens": 60, "max_tokens": 70, **GREEDY},
    "allowed": {"allowed_token_ids": list(range(2, 704, 3)), **RANDOM},
    "bad-words": {"bad_words": ["the", "=", "so the", "left"], **GREEDY},
    "stop-tokens": {"stop_token_ids": list(range(200, 320)), "min_tokens": 7, **GREEDY},
    "everything": {
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.1,
        "logit_bias": {"260": 1, "300": -2},
        "min_tokens": 9,
        "min_p": 0.02,
        "top_p": 0.95,
        "stop": [" 2"],
        **RANDOM,
    },
    **{f"length-{n}": {"max_tokens": n, "frequency_penalty": 0.3, **GREEDY} for n in range(1, 7)},
}


async def ask(cluster: RunningCluster) -> dict[str, list[dict[str, Any]]]:
    """Return the choices of every case, one chat and one completion each, sent all at once."""
    problem = take(1, 31, "heldout")[0].question
    chat = {"messages": [{"role": "user", "content": problem}], "logprobs": True, "top_logprobs": 3}
    text = {"prompt": f"Question: {problem}\nAnswer:", "logprobs": 3}

    async def one(client: Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
        async with client.session.post(f"/v1/{path}", json=body) as response:
            answer = await response.json()
            assert response.status == 200, answer
            choice: dict[str, Any] = answer["choices"][0]
            return {**choice, "tokens": answer["usage"]["completion_tokens"]}

    async with Client(cluster.url) as client:
        answers = await asyncio.gather(
            *(
                one(client, path, {**body, "max_tokens": 40, **fields})
                for fields in CASES.values()
                for path, body in (("chat/completions", chat), ("completions", text))
            )
        )
    return {name: list(answers[2 * index : 2 * index + 2]) for index, name in enumerate(CASES)}


def expect_alike(found: Any, wanted: Any) -> None:
    """Expect equality except for rounding of logprobs."""
    assert type(found) is type(wanted)
    if isinstance(wanted, dict):
        assert list(found) == list(wanted)
        for key in wanted:
            expect_alike(found[key], wanted[key])
    elif isinstance(wanted, list):
        assert len(found) == len(wanted)
        for pair in zip(found, wanted):
            expect_alike(*pair)
    else:
        assert found == (pytest.approx(wanted, abs=1e-3) if isinstance(wanted, float) else wanted)


async def test_trees_change_nothing(cluster: RunningCluster, tmp_path: Path) -> None:
    """Text, tokens, logprobs, finish reason and usage are equal with and without trees."""
    plain = await ask(cluster)
    async with RunningCluster(tmp_path, config=TREES) as drafting:
        found = await ask(drafting)
        async with Client(drafting.url) as client:
            await client.wait_idle()
            info = await client.info()
    (state,) = info["internal_states"]
    assert all(node["config"]["sampling_bytes"] > 65 * 704 * 4 for node in info["nodes"])
    assert state["avg_spec_accept_length"] > 1.5
    for name in CASES:
        expect_alike(found[name], plain[name])
    texts = {name: [choice.get("text", choice.get("message")) for choice in plain[name]] for name in CASES}
    assert texts["repetition"] != texts["presence"]
    assert all(choice["tokens"] >= 60 for choice in plain["min_tokens"])
    assert all(choice["tokens"] >= 8 for choice in plain["stop-tokens"])
    assert all(choice["tokens"] > 25 for choice in plain["late-stops"])
    assert {choice["finish_reason"] for choice in plain["stops"] + plain["late-stops"]} == {"stop"}
    for n in range(1, 7):
        assert [choice["tokens"] for choice in plain[f"length-{n}"]] == [n, n]
