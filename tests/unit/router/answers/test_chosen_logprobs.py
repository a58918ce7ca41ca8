"""Log-probabilities of tokens that a client names, in the forms of vLLM and SGLang, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from common.messages.generation import MAX_LOGPROB_IDS, OutputToken, PromptLogprob, TokenLogprob
from router.answers.openai_responses import LOWEST_LOGPROB
from router.dispatch.generation import TokenDelta
from router.tokens.tokenizer import Tokenizer
from tests.unit.router.conftest import SERVED, Rig

CHAT, TEXT, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
IDS = [300, 331, 7]
TOKENS = [
    OutputToken(331, TokenLogprob(-0.5, (331, 5), (-0.5, -0.75), (-2.0, -0.5, -float("inf")))),
    OutputToken(10, TokenLogprob(-1.5, (331, 5), (-0.5, -0.75), (-3.0, -4.0, -5.0))),
]
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {
        "messages": [{"role": "user", "content": "Hi"}],
        "logprobs": True,
        "top_logprobs": 1,
        "logprob_token_ids": IDS,
    },
    TEXT: {"prompt": "Hi", "logprobs": 1, "logprob_token_ids": IDS},
    GENERATE: {
        "text": "Hi",
        "return_logprob": True,
        "top_logprobs_num": 1,
        "token_ids_logprob": IDS,
        "return_text_in_logprobs": True,
    },
}


def script(rig: Rig) -> None:
    rig.generator.will(TokenDelta(TOKENS[:1], None, 0), TokenDelta(TOKENS[1:], "length", None))


async def choices(rig: Rig, path: str, streamed: bool) -> list[dict[str, Any]]:
    """Return the choice of a complete answer, or those of all events of a stream."""
    script(rig)
    if not streamed:
        status, answer, _ = await rig.post(path, BODIES[path])
        assert status == 200, answer
        return answer["choices"] if path != GENERATE else [answer]
    raw = (await rig.raw(path, BODIES[path] | {"stream": True})).decode()
    events = [json.loads(line[6:]) for line in raw.split("\n\n")[:-2]]
    return [event["choices"][0] for event in events] if path != GENERATE else events[-1:]


@pytest.mark.parametrize("streamed", [False, True])
async def test_chats_list_the_token_and_the_named_ones(
    rig: Rig, tokenizer: Tokenizer, streamed: bool
) -> None:
    found = [each["logprobs"]["content"] for each in await choices(rig, CHAT, streamed) if each["logprobs"]]
    tops = [each["top_logprobs"] for content in found for each in content]
    name = tokenizer.token_text
    assert [[(each["token"], each["logprob"]) for each in top] for top in tops] == [
        [(name(331), -0.5), (name(300), -2.0), (name(7), LOWEST_LOGPROB)],
        [(name(10), -1.5), (name(300), -3.0), (name(331), -4.0), (name(7), -5.0)],
    ]
    asked = rig.generator.requests[-1].sampling
    assert (asked.logprobs, asked.logprob_ids) == (1, tuple(IDS))


@pytest.mark.parametrize("streamed", [False, True])
async def test_completions_list_them_by_their_text(rig: Rig, tokenizer: Tokenizer, streamed: bool) -> None:
    found = [each["logprobs"]["top_logprobs"] for each in await choices(rig, TEXT, streamed)]
    name = tokenizer.token_text
    assert [top for tops in found for top in tops] == [
        {name(300): -2.0, name(331): -0.5, name(7): LOWEST_LOGPROB},
        {name(300): -3.0, name(331): -4.0, name(7): -5.0, name(10): -1.5},
    ]


async def test_an_echoed_prompt_lists_them_too(rig: Rig, tokenizer: Tokenizer) -> None:
    scores = [PromptLogprob(-0.25, 2, (331,), (-0.125,), (-2.0, -0.5, -6.0))]
    rig.generator.will(TokenDelta(TOKENS[:1], "length", 0, scores))
    _, answer, _ = await rig.post(TEXT, BODIES[TEXT] | {"prompt": [5, 6], "echo": True})
    name = tokenizer.token_text
    assert answer["choices"][0]["logprobs"]["top_logprobs"][:2] == [
        None,
        {name(300): -2.0, name(331): -0.5, name(7): -6.0, name(6): -0.25},
    ]


@pytest.mark.parametrize("streamed", [False, True])
async def test_generate_lists_them_beside_the_likeliest(
    rig: Rig, tokenizer: Tokenizer, streamed: bool
) -> None:
    [answer] = await choices(rig, GENERATE, streamed)
    meta, name = answer["meta_info"], tokenizer.token_text
    assert meta["input_token_ids_logprobs"] == []
    assert meta["output_token_ids_logprobs"] == [
        [[-2.0, 300, name(300)], [-0.5, 331, name(331)], [LOWEST_LOGPROB, 7, name(7)]],
        [[-3.0, 300, name(300)], [-4.0, 331, name(331)], [-5.0, 7, name(7)]],
    ]
    assert meta["output_top_logprobs"] == [[[-0.5, 331, name(331)]]] * 2


@pytest.mark.parametrize("given", [[], None])
async def test_without_them_the_likeliest_are_listed(
    rig: Rig, tokenizer: Tokenizer, given: list[int] | None
) -> None:
    rig.generator.will(TokenDelta([OutputToken(331, TokenLogprob(-0.5, (5,), (-0.75,)))], "length", 0))
    _, chat, _ = await rig.post(CHAT, BODIES[CHAT] | {"logprob_token_ids": given})
    [entry] = chat["choices"][0]["logprobs"]["content"]
    assert [each["token"] for each in entry["top_logprobs"]] == [tokenizer.token_text(5)]
    _, native, _ = await rig.post(GENERATE, BODIES[GENERATE] | {"token_ids_logprob": given})
    assert not [name for name in native["meta_info"] if "token_ids_logprobs" in name]
    assert [each.sampling.logprob_ids for each in rig.generator.requests] == [(), ()]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"logprobs": None, "top_logprobs": None}, "logprob_token_ids"),
        (TEXT, {"logprobs": None}, "logprob_token_ids"),
        (TEXT, {"logprob_token_ids": [SERVED.vocab_size]}, "logprob_token_ids"),
        (TEXT, {"logprob_token_ids": [-1]}, "logprob_token_ids"),
        (TEXT, {"logprob_token_ids": [1 << 70]}, "logprob_token_ids"),
        (TEXT, {"logprob_token_ids": [1] * (MAX_LOGPROB_IDS + 1)}, "logprob_token_ids"),
        (GENERATE, {"return_logprob": False, "top_logprobs_num": 0}, "token_ids_logprob"),
        (GENERATE, {"token_ids_logprob": [[5]]}, "token_ids_logprob"),
        (GENERATE, {"token_ids_logprob": [SERVED.vocab_size]}, "token_ids_logprob"),
    ],
)
async def test_what_cannot_be_listed_is_refused(
    path: str, fields: dict[str, Any], param: str, rig: Rig
) -> None:
    script(rig)
    status, answer, _ = await rig.post(path, BODIES[path] | fields)
    assert status == 400
    assert answer["error"]["param"].startswith(param)
