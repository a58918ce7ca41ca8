"""/generate in front of a real cluster of the tiny model that thinks: what meta_info says of the answer."""

from __future__ import annotations

from collections.abc import Iterator

import aiohttp
import pytest

from tests.cluster.check_families import shipped
from tests.cluster.harness import RunningCluster, post

pytestmark = pytest.mark.timeout(900)

GREEDY = {"temperature": 0, "max_new_tokens": 80}
MESSAGES = [{"role": "user", "content": "What is 12 * 7?"}]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    with RunningCluster(tmp_path_factory.mktemp("generate"), config=shipped("tools")) as running:
        yield running


async def test_tokens_of_reasoning(cluster: RunningCluster) -> None:
    """With its markers; usage of the same chat counts what is between them."""
    async with aiohttp.ClientSession(cluster.url) as session:
        chat = await post(session, "/v1/chat/completions", messages=MESSAGES, temperature=0, max_tokens=80)
        prompt = (await post(session, "/tokenize", messages=MESSAGES))["tokens"]
        thought = chat["choices"][0]["message"]["reasoning_content"]
        answer = await post(session, "/generate", input_ids=prompt, sampling_params=GREEDY)
        found = answer["meta_info"]["reasoning_tokens"]
        tokens = answer["output_ids"][:found]
        text = (await post(session, "/detokenize", tokens=tokens))["text"]
        assert text == f"<think>\n{thought}\n</think>"
        assert answer["text"].startswith(text)
        assert chat["usage"]["reasoning_tokens"] == found - 2
        begun = await post(session, "/generate", input_ids=prompt + tokens[:3], sampling_params=GREEDY)
        assert begun["meta_info"]["reasoning_tokens"] == found - 3


async def test_a_stop_string_leaves_the_figures_of_speculation(cluster: RunningCluster) -> None:
    """A stop string ends the answer at the router; tokens and steps past it do not count, also in /requests."""
    async with aiohttp.ClientSession(cluster.url) as session:
        prompt = (await post(session, "/tokenize", messages=MESSAGES))["tokens"]
        whole = await post(session, "/generate", input_ids=prompt, sampling_params=GREEDY)
        text, found = whole["text"], [whole["meta_info"]]
        for cut in (len(text) - 8, len(text) // 2, 14):
            stop = text[cut : cut + 5]
            params = GREEDY | {"stop": [stop]}
            answer = await post(session, "/generate", input_ids=prompt, sampling_params=params)
            assert answer["text"] == text[: text.index(stop)]
            assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
            found.append(answer["meta_info"])
        for meta in found:
            async with session.get(f"/requests/{meta['id']}") as response:
                timeline = await response.json()
            assert timeline["outcome"] == "stop"
            assert timeline["accept_length"] == round(meta["spec_accept_length"], 3)
    rounds = [meta["spec_verify_ct"] for meta in found]
    assert rounds == sorted(rounds, reverse=True)
    assert rounds[0] > rounds[-1] > 0
    for meta in found:
        given = meta["spec_verify_ct"] * meta["spec_accept_length"]
        # The prefill node gives the first token; steps without drafts give one each.
        assert meta["spec_verify_ct"] <= given + 1e-3
        assert given <= meta["completion_tokens"] - 1 + 1e-3
