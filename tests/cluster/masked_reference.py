"""Compares answers with a reference in this process: the model's logits under the grammar's mask, then one draw.

A whole answer is checked by one forward. Each of its tokens is compared with the token that the reference draws after
the tokens before it, so an answer without a difference is the one that the reference generates token by token.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from common.checkpoint.model_config import ModelConfig
from common.engine.ops.philox import token_words
from common.engine.ops.sample_tokens import gumbel
from common.grammar import mask_width
from common.grammar.model_tokenizer import compiler_for
from common.messages.generation import ThinkingLimit
from deploy.tiny_models.mixture import checkpoint
from deploy.tiny_models.mixture.shapes import FAMILIES
from router.grammar.grammar_text import grammar_text
from router.requests.constraint_fields import ConstraintFields
from router.requests.read_constraint import read_constraint
from tests.cluster.check_families import shipped
from tests.fakes.tiny_model import forced_end

# Of logits, relative to the noise of a draw: forwards of other shapes round differently.
NEAR_TIE = 1e-3


@dataclass(frozen=True)
class Question:
    """A request: its prompt, the fields that constrain its answer, if any, and how tokens are drawn."""

    prompt: list[int]
    fields: dict[str, Any]
    temperature: float
    seed: int
    max_tokens: int
    grammar: str | None = None  # what chats constrain in other ways
    thinking: ThinkingLimit | None = None

    def constraint(self) -> str | None:
        """Return the grammar; None if the answer is free."""
        found = read_constraint(msgspec.convert(self.fields, ConstraintFields))
        return self.grammar if found is None else grammar_text(found)


@dataclass(frozen=True)
class Difference:
    """The first token of an answer that the reference does not draw."""

    index: int
    found: int | None  # None: the answer has ended
    expected: int | None  # None: the answer has to end
    near_tie: bool  # the two are equally likely but for rounding

    def __str__(self) -> str:
        return f"token {self.index} is {self.found}, the reference draws {self.expected}"


class MaskedReference:
    """Draws the tokens that the answers to a model's requests should have."""

    def __init__(self, model: Any, directory: Path, config: ModelConfig) -> None:
        """`model`: a causal language model of transformers in float32."""
        self._model = model
        self._compiler = compiler_for(directory, config)
        self._vocab = config.vocab_size
        self._eos = config.eos_token_ids

    @torch.inference_mode()
    def difference(self, asked: Question, answer: list[int], finish: str) -> Difference | None:
        """Compare an answer; `finish` is its finish reason."""
        ids = answer[:-1] if answer and answer[-1] in self._eos else answer
        allowed, over = self._allowed(asked.constraint(), ids)
        if asked.thinking is not None:
            for row in range(len(ids) + 1):
                end = forced_end(ids[:row], asked.thinking)
                if end is not None:
                    allowed[row, :end] = allowed[row, end + 1 :] = False
        logits = self._model(torch.tensor([asked.prompt + ids])).logits[0, len(asked.prompt) - 1 :]
        scores = self._scores(logits.float().masked_fill(~allowed, -torch.inf), asked)
        drawn = scores.argmax(-1).tolist()
        for index, token in enumerate(ids):
            if drawn[index] != token:
                return self._differ(index, token, drawn[index], scores[index])
        if finish == "length":
            return None if len(ids) >= asked.max_tokens else Difference(len(ids), None, drawn[-1], False)
        if over or drawn[-1] in self._eos:
            return None
        return self._differ(len(ids), None, drawn[-1], scores[-1])

    def _allowed(self, grammar: str | None, ids: list[int]) -> tuple[Tensor, bool]:
        """Return which tokens may come in each place, [len(ids) + 1, V], and whether the answer has to end there."""
        rows = len(ids) + 1
        if grammar is None:
            return torch.ones(rows, self._vocab, dtype=torch.bool), False
        matcher = self._compiler.matcher(grammar)
        masks = np.zeros((rows, mask_width(self._vocab)), dtype=np.int32)
        for index, token in enumerate(ids):
            matcher.fill(masks, index)
            if matcher.stopped or not matcher.accept([token]):
                break
        else:
            matcher.fill(masks, len(ids))
        # Rows after a token that the grammar forbids are empty; that token is a difference.
        bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")[:, : self._vocab]
        return torch.from_numpy(bits.astype(bool)), matcher.stopped

    def _scores(self, logits: Tensor, asked: Question) -> Tensor:
        """Return the values whose maximum is drawn: logits, or the perturbed logits of a random draw."""
        if asked.temperature == 0:
            return logits
        first = len(asked.prompt)
        position = torch.arange(first, first + len(logits))
        words = token_words(torch.full_like(position, asked.seed), position, self._vocab)
        return logits / asked.temperature + gumbel(words)

    def _differ(self, index: int, found: int | None, expected: int, scores: Tensor) -> Difference:
        ends = [float(scores[token]) for token in (self._eos if found is None else (found,))]
        near = float(scores[expected]) - max(ends) < NEAR_TIE
        return Difference(index, found, expected, near)


def shipped_reference(name: str) -> MaskedReference:
    """Return the reference for the model of deploy/clusters/local-NAME.yaml."""
    directory = Path(shipped(name)["model"]["path"])
    if name in FAMILIES:
        model: Any = checkpoint.load(directory, FAMILIES[name])[0]
    else:
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    return MaskedReference(model, directory, ModelConfig.load(directory))
