"""Scores and accept lengths on held-out questions, computed by transformers in this process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import LlavaForConditionalGeneration

from deploy.tiny_models import tokenizer as family
from deploy.tiny_models.drafts.heads import Head
from deploy.tiny_models.drafts.measure import Acceptance, Answered
from deploy.tiny_models.drafts.measure import acceptance as acceptance_of
from deploy.tiny_models.generation import greedy
from deploy.tiny_models.vision.batches import merged_embeddings, normalized
from deploy.tiny_models.vision.checkpoint import language_model
from deploy.tiny_models.vision.examples import prompt
from deploy.tiny_models.vision.questions import Question, is_right, questions

MAX_NEW_TOKENS = 96  # the longest correct answer has 80
ROWS = 256
SEED = 2_024


@dataclass(frozen=True, slots=True)
class Reply:
    """A question with the model's greedy answer."""

    question: Question
    asked: list[int]
    said: list[int]  # the answer, end token included
    text: str


@dataclass(slots=True)
class Score:
    """Correct answers per kind of question."""

    asked: Counter[str] = field(default_factory=Counter)
    right: Counter[str] = field(default_factory=Counter)

    @property
    def value(self) -> float:
        return self.right.total() / max(1, self.asked.total())


def pixels_of(question: Question, device: torch.device) -> Tensor:
    """Return the pictures of a question as [pictures, 3, SIDE, SIDE]."""
    return normalized(torch.from_numpy(np.stack(question.images)).to(device))


@torch.inference_mode()
def answers(
    model: LlavaForConditionalGeneration, tokenizer: Tokenizer, asked: Sequence[Question]
) -> Iterator[Reply]:
    """Yield greedy answers, batched with left padding."""
    pad, end = family.id_of(tokenizer, family.PAD), family.id_of(tokenizer, family.END)
    for start in range(0, len(asked), ROWS):
        some = asked[start : start + ROWS]
        ids = [tokenizer.encode(prompt(each), add_special_tokens=False).ids for each in some]
        pictures = [pixels_of(each, model.device) for each in some if each.images]
        images = {"pixel_values": torch.cat(pictures)} if pictures else {}
        new = greedy(model, ids, pad, end, MAX_NEW_TOKENS, **images)
        for question, own, said in zip(some, ids, new, strict=True):
            yield Reply(question, own, said, tokenizer.decode(said))


def score(replies: Sequence[Reply]) -> Score:
    found = Score()
    for reply in replies:
        found.asked[reply.question.kind] += 1
        found.right[reply.question.kind] += is_right(reply.question, reply.text)
    return found


def held_out(count: int) -> list[Question]:
    return list(islice(questions(SEED, "heldout"), count))


@torch.inference_mode()
def acceptance(
    head: Head, model: LlavaForConditionalGeneration, replies: Sequence[Reply], steps: Sequence[int]
) -> Iterator[Acceptance]:
    """Yield accept lengths over the model's own answers, by the oracle, for questions with and without pictures."""
    target = language_model(model)
    for name, wanted in (("pictures", True), ("text alone", False)):
        answered = [answered_by(model, reply) for reply in replies if bool(reply.question.images) == wanted]
        for some in steps if answered else ():
            yield acceptance_of(name, head, target, answered, some)


def answered_by(model: LlavaForConditionalGeneration, reply: Reply) -> Answered:
    ids = torch.tensor([[*reply.asked, *reply.said]], device=model.device)
    inner: Any = model
    if reply.question.images:
        embeds = merged_embeddings(model, ids, pixels_of(reply.question, model.device))[0]
    else:
        embeds = inner.model.language_model.embed_tokens(ids)[0]
    return Answered(ids[0].tolist(), len(reply.asked), embeds)
