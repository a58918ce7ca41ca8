"""Limits of reasoning tokens on a real cluster of the tiny model that thinks, against transformers with a mask."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from deploy.tiny_models.tokenizer import id_of
from deploy.tiny_models.tool_calls import checkpoint
from deploy.tiny_models.tool_calls.chat_form import END, THINK, THINK_END
from tests.cluster.asked_calls import put_together
from tests.cluster.check_families import shipped
from tests.cluster.harness import ROOT, Client, RunningCluster
from tests.cluster.test_tool_calls import PRODUCT, TOOLS, TWO

pytestmark = pytest.mark.timeout(900)

MODEL = ROOT / "deploy" / "tiny_models" / "tiny-tools"
MAX_TOKENS = 120  # tokens of an answer


class Budget(LogitsProcessor):
    """Leaves only the closing marker once the answer's first reasoning has `tokens` tokens."""

    def __init__(self, tokens: int, think: int, think_end: int) -> None:
        self._tokens = tokens
        self._think, self._think_end = think, think_end

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        ids = input_ids[0].tolist()
        begin = len(ids) - 1 - ids[::-1].index(self._think) if self._think in ids else len(ids)
        inside = begin < len(ids) and self._think_end not in ids[begin:]
        if inside and len(ids) - begin - 1 >= self._tokens:
            scores[0, : self._think_end] = scores[0, self._think_end + 1 :] = -torch.inf
        return scores


class Reference:
    """Greedy decoding by transformers."""

    def __init__(self) -> None:
        self.encoder = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
        self.think, self.think_end = (id_of(self.encoder, each) for each in (THINK, THINK_END))
        self._model: Any = checkpoint.load(MODEL)
        self._end = id_of(self.encoder, END)
        self._answers: dict[tuple[int, tuple[int, ...]], list[int]] = {}

    def answer(self, prompt: list[int], tokens: int, guess: Sequence[int] = ()) -> list[int]:
        """Return the answer whose reasoning has at most `tokens` tokens.

        `guess`: what is probably right. One forward confirms it, in a tenth of the time that it takes to generate it.
        """
        key = tokens, tuple(prompt)
        if key not in self._answers:
            right = self._is_greedy(prompt, tokens, list(guess))
            self._answers[key] = list(guess) if right else self._generate(prompt, tokens)
        return self._answers[key]

    def _rules(self, tokens: int) -> Budget:
        return Budget(tokens, self.think, self.think_end)

    @torch.inference_mode()
    def _is_greedy(self, prompt: list[int], tokens: int, answer: list[int]) -> bool:
        """Return whether each token is the most likely one that the rules leave, and the answer is complete."""
        if self._end in answer[:-1] or (len(answer) != MAX_TOKENS and answer[-1:] != [self._end]):
            return False
        ids: Any = torch.tensor([prompt + answer])
        rules = self._rules(tokens)
        scores = self._model(ids[:, :-1]).logits[0, len(prompt) - 1 :]
        return all(
            int(rules(ids[:, : len(prompt) + index], scores[index : index + 1]).argmax()) == token
            for index, token in enumerate(answer)
        )

    @torch.inference_mode()
    def _generate(self, prompt: list[int], tokens: int) -> list[int]:
        settings = {"do_sample": False, "max_new_tokens": MAX_TOKENS, "eos_token_id": [self._end]}
        rules = LogitsProcessorList([self._rules(tokens)])
        config = GenerationConfig.from_dict({**settings, "pad_token_id": self._end})
        out = self._model.generate(torch.tensor([prompt]), generation_config=config, logits_processor=rules)
        new: list[int] = out[0, len(prompt) :].tolist()
        return new


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    with RunningCluster(tmp_path_factory.mktemp("thinking"), config=shipped("tools")) as running:
        yield running


async def ask(client: Client, path: str, **body: Any) -> dict[str, Any]:
    async with client.session.post(path, json=body) as response:
        answer: dict[str, Any] = await response.json()
        assert response.status == 200, answer
        return answer


def chat(question: str, **fields: Any) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
        "max_tokens": MAX_TOKENS,
        "return_token_ids": True,
        **fields,
    }


@pytest.mark.parametrize("tokens", [0, 1, 2, 5, 8, 13, 100])
async def test_greedy_texts_are_those_of_a_reference_that_masks(
    cluster: RunningCluster, reference: Reference, tokens: int
) -> None:
    """With and without tools, and streamed; the model opens its reasoning itself."""
    async with Client(cluster.url) as client:
        for question, more in ((PRODUCT, {"tools": TOOLS}), (TWO, {"tools": TOOLS}), (PRODUCT, {})):
            body = chat(question, thinking_token_budget=tokens, **more)
            answer = await ask(client, "/v1/chat/completions", **body)
            [choice] = answer["choices"]
            expected = reference.answer(answer["prompt_token_ids"], tokens, choice["token_ids"])
            assert choice["token_ids"] == expected
            assert reference.think_end in expected
            free = reference.answer(answer["prompt_token_ids"], 1000)
            thought = min(free.index(reference.think_end) - 1, tokens)
            assert expected.index(reference.think_end) == thought + 1
            assert (expected == free) is (tokens >= free.index(reference.think_end) - 1)
            said = reference.encoder.decode(expected[1 : thought + 1]).strip()
            assert (choice["message"].get("reasoning_content") or "") == said
            async with client.session.post("/v1/chat/completions", json=body | {"stream": True}) as response:
                lines = [line[6:] async for line in response.content if line.startswith(b"data: ")]
            _, whole = put_together([json.loads(line) for line in lines[:-1]])
            assert whole["choices"][0]["token_ids"] == expected


async def test_the_prompt_may_open_the_reasoning(cluster: RunningCluster, reference: Reference) -> None:
    """A message of the assistant that is continued inside its reasoning; a completion of the same tokens."""
    begun = [{"role": "user", "content": PRODUCT}, {"role": "assistant", "content": f"{THINK}\nI need 12"}]
    fields = {"continue_final_message": True, "add_generation_prompt": False}
    async with Client(cluster.url) as client:
        for tokens in (0, 5, 7, 100):
            body = chat("", tools=TOOLS, **fields) | {"messages": begun, "thinking_token_budget": tokens}
            answer = await ask(client, "/v1/chat/completions", **body)
            prompt = answer["prompt_token_ids"]
            expected = reference.answer(prompt, tokens, answer["choices"][0]["token_ids"])
            assert answer["choices"][0]["token_ids"] == expected
            common = {"temperature": 0, "return_token_ids": True, "max_tokens": MAX_TOKENS}
            text = await ask(client, "/v1/completions", prompt=prompt, thinking_token_budget=tokens, **common)
            assert text["choices"][0]["token_ids"] == expected
            sampling = {
                "temperature": 0,
                "max_new_tokens": MAX_TOKENS,
                "custom_params": {"thinking_budget": tokens},
            }
            native = await ask(client, "/generate", input_ids=prompt, sampling_params=sampling)
            assert native["output_ids"] == expected


async def test_seeded_texts_with_grammars_keep_to_the_limit(
    cluster: RunningCluster, reference: Reference
) -> None:
    """JSON, or a forced call, begins after the reasoning, whose end is forced."""
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    forms: list[dict[str, Any]] = [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}},
        {"tools": TOOLS, "tool_choice": "required"},
    ]
    async with Client(cluster.url) as client:
        for tokens in (0, 3, 6):
            for form in forms:
                body = chat(PRODUCT, thinking_token_budget=tokens, seed=tokens, **form)
                answer = await ask(client, "/v1/chat/completions", **body | {"temperature": 1})
                [choice] = answer["choices"]
                ids = choice["token_ids"]
                if reference.think in ids:
                    assert ids.index(reference.think_end) - ids.index(reference.think) - 1 <= tokens
                assert choice["message"]["content"] or choice["message"]["tool_calls"]
                if "tools" not in form:
                    fields = {key: value for key, value in body.items() if key != "messages"}
                    fields |= {"prompt": answer["prompt_token_ids"], "temperature": 1}
                    completion = await ask(client, "/v1/completions", **fields)
                    assert completion["choices"][0]["token_ids"] == ids


async def test_thinking_of_anthropics_clients(cluster: RunningCluster) -> None:
    async with Client(cluster.url) as client:
        thoughts = list[list[str]]()
        for thinking in (
            {"type": "enabled", "budget_tokens": 4},
            {"type": "enabled", "budget_tokens": 1024},
            {"type": "adaptive"},
            {"type": "disabled"},
        ):
            body = {
                "messages": [{"role": "user", "content": PRODUCT}],
                "max_tokens": MAX_TOKENS,
                "temperature": 0,
            }
            answer = await ask(client, "/v1/messages", **body, thinking=thinking)
            blocks = answer["content"]
            thoughts.append([each["thinking"] for each in blocks if each["type"] == "thinking"])
    short, whole, adaptive, none = thoughts
    assert none == []
    assert whole == adaptive
    assert short[0] != whole[0]
    assert whole[0].startswith(short[0])
