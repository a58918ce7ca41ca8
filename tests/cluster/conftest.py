"""Fixtures of the cluster tests: a default cluster, prompts of every length, and the reference answers."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import tokenizers
import torch
from transformers import AutoModelForCausalLM

from deploy.tiny_models.prompts import few_shot_prompt
from deploy.tiny_models.word_problems import take
from router.tokens.tokenizer import Tokenizer
from tests.cluster.harness import MODEL, RunningCluster
from tests.cluster.masked_reference import MaskedReference, shipped_reference

OUTPUT_TOKENS = 12
LONGEST = 1500


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer(MODEL)


@pytest.fixture(scope="session")
def prompts(tokenizer: Tokenizer) -> list[list[int]]:
    """Return 100 prompts of 1 to 1,500 tokens: beginnings of few-shot documents, and random token ids."""
    rng = random.Random(11)
    encoder = tokenizers.Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    # 1 .. 1500, evenly spaced in log scale
    lengths = [max(1, round(LONGEST ** (i / 99))) for i in range(100)]
    result: list[list[int]] = []
    for index, length in enumerate(lengths):
        if index % 3 == 0:
            result.append([rng.randrange(3, tokenizer.vocab_size) for _ in range(length)])
            continue
        *shots, last = take(40, 1000 + index, "heldout")
        document = few_shot_prompt(shots, last.question)
        ids = encoder.encode(document).ids
        result.append((ids * 2)[:length])
    return result


def prompt_of(length: int, seed: int) -> list[int]:
    """Return random token ids."""
    rng = random.Random(seed)
    return [rng.randrange(3, 700) for _ in range(length)]


class Reference:
    """Greedy continuations by `transformers` in float32, computed once per prompt and length."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
        self._tokenizer = tokenizer
        # Tokens of bytes that are not whole characters share a text: a guess with one of them is rarely confirmed.
        self._ids = {tokenizer.token_text(token): token for token in range(tokenizer.vocab_size)}
        self._made: dict[tuple[int, ...], list[int]] = {}

    def __call__(
        self, prompt: list[int], max_tokens: int = OUTPUT_TOKENS, guess: Sequence[str] = ()
    ) -> list[str]:
        """Return the texts of the tokens, one by one, as logprobs show them.

        `guess`: texts that are probably right, such as those of an answer. One forward confirms them all, in a
        twentieth of the time that it takes to generate them. If one differs, all are generated.
        """
        known = self._made.get(tuple(prompt), [])
        if len(known) < max_tokens == len(guess) and self._ids.keys() >= set(guess):
            guessed = [self._ids[text] for text in guess]
            if self._is_greedy(prompt, guessed):
                self._made[tuple(prompt)] = guessed
        return [self._tokenizer.token_text(token) for token in self.ids(prompt, max_tokens)]

    @torch.inference_mode()
    def _is_greedy(self, prompt: list[int], continuation: list[int]) -> bool:
        """Return whether each token is the most likely one after those before it."""
        logits = self._model(torch.tensor([prompt + continuation[:-1]])).logits
        best: list[int] = logits[0, len(prompt) - 1 :].argmax(-1).tolist()
        return best == continuation

    def ids(self, prompt: list[int], max_tokens: int) -> list[int]:
        known = self._made.get(tuple(prompt), [])
        if len(known) < max_tokens:
            with torch.inference_mode():
                output = self._model.generate(
                    torch.tensor([prompt + known]),
                    attention_mask=torch.ones(1, len(prompt) + len(known), dtype=torch.long),
                    max_new_tokens=max_tokens - len(known),
                    do_sample=False,
                    eos_token_id=None,
                    pad_token_id=0,
                )
            known = self._made[tuple(prompt)] = output[0, len(prompt) :].tolist()
        return known[:max_tokens]

    @torch.no_grad()
    def states(self, ids: list[int]) -> torch.Tensor:
        """Return the hidden states [n, H] after the final norm."""
        output = self._model(torch.tensor([ids]), output_hidden_states=True)
        last: torch.Tensor = output.hidden_states[-1][0]
        return last


@pytest.fixture(scope="session")
def reference(tokenizer: Tokenizer) -> Reference:
    return Reference(tokenizer)


@pytest.fixture(scope="session")
def masked_reference() -> MaskedReference:
    return shipped_reference("plain")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    """Run one prefill and one decode node with the default config, shared by the tests of a module."""
    with RunningCluster(tmp_path_factory.mktemp("cluster")) as running:
        yield running
