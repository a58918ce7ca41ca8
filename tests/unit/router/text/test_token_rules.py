"""`allowed_token_ids` and `bad_words` over HTTP: what the nodes get, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from common.messages.generation import SamplingParams, TokenRules
from tests.unit.router.conftest import SERVED, Rig
from tests.unit.router.scripted_generator import one_by_one

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
PROMPTS: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "Hi"}]},
    TEXT: {"prompt": "Hi"},
}


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_the_nodes_get_tokens(path: str, rig: Rig) -> None:
    """As in vLLM, a word is also forbidden with a space before it if it then has as many tokens, but another first."""
    rig.generator.will(*one_by_one([331]))
    body = {**PROMPTS[path], "allowed_token_ids": [7, 331, 7], "bad_words": [" Anna", "bags of"]}
    status, answer, _ = await rig.post(path, body)
    assert status == 200, answer
    rules = rig.generator.requests[-1].sampling.token_rules
    assert rules is not None
    assert rules.allowed == (7, 331)
    for word in ("Anna", "bags of"):
        plain = tuple(rig.tokenizer.encode(word, False))
        spaced = tuple(rig.tokenizer.encode(f" {word}", False))
        assert plain in rules.bad_words
        assert (spaced in rules.bad_words) is (len(plain) == len(spaced) and plain[0] != spaced[0])
    await rig.post(path, {**PROMPTS[path], "bad_words": ["Anna", "Anna"]})
    rules = rig.generator.requests[-1].sampling.token_rules
    assert rules is not None
    assert len(set(rules.bad_words)) == len(rules.bad_words)
    await rig.post(path, {**PROMPTS[path], "bad_words": []})
    assert rig.generator.requests[-1].sampling.token_rules is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"allowed_token_ids": [2], "min_tokens": 1}, "allowed_token_ids"),
        ({"allowed_token_ids": [5, 6], "stop_token_ids": [5, 6], "min_tokens": 1}, "allowed_token_ids"),
        ({"bad_words": ["a b c d e f g h i j k l m n o p q r s t u v w x y z " * 4]}, "bad_words"),
    ],
)
async def test_what_leaves_no_answer_is_refused(fields: dict[str, Any], param: str, rig: Rig) -> None:
    status, answer, _ = await rig.post(TEXT, {"prompt": "Hi", "max_tokens": 4, **fields})
    assert (status, answer["error"]["param"]) == (400, param)


def test_tokens_outside_the_vocabulary_do_not_fit() -> None:
    """Nodes refuse what a router let through: the tokens are indices of masks."""
    size = SERVED.vocab_size
    for rules in (TokenRules((size,)), TokenRules((), ((1, size),)), TokenRules((), ((size, 1),))):
        assert not SamplingParams(max_tokens=1, token_rules=rules).fits(size)
    assert SamplingParams(max_tokens=1, token_rules=TokenRules((size - 1,), ((0, 1),))).fits(size)
