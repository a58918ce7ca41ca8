"""Accept lengths of a draft on held-out problems: the oracle walks the target's greedy answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from deploy.tiny_models import tokenizer as family
from deploy.tiny_models.drafts.features import Shared, target_features
from deploy.tiny_models.drafts.heads import Eagle3Head, Head, StandaloneHead
from deploy.tiny_models.drafts.oracle import Round, accept_length, accepted_at, ok_matrix, perfect, walk
from deploy.tiny_models.generation import greedy
from deploy.tiny_models.greedy_eval import MAX_NEW_TOKENS, prompts
from deploy.tiny_models.greedy_eval import Suite as Asked
from deploy.tiny_models.language_model import LanguageModel
from deploy.tiny_models.prompts import QUESTION, SHOT_END
from deploy.tiny_models.word_problems import exam

TOKENS_PER_BATCH = 96_000


@dataclass(frozen=True, slots=True)
class Suite:
    """Held-out prompts. With `answers` the text ends with the answer, otherwise after 64 arbitrary tokens."""

    name: str
    prompts: tuple[str, ...]  # special tokens included
    answers: bool


@dataclass(frozen=True, slots=True)
class Answered:
    """A prompt with the target's greedy continuation."""

    ids: list[int]  # prompt and continuation
    prompt_tokens: int
    # [len(ids), hidden] the target's input, where it is not only embeddings of the ids
    embeds: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Acceptance:
    """One row of the model card."""

    suite: str
    count: int
    steps: int
    length: float
    most: float  # the accept length of a draft that is always right
    per_step: list[float]


def suites(count: int) -> tuple[Suite, ...]:
    """Return suites of chat answers, 8-shot answers, and truncated questions, whose continuations are hard to draft."""
    chat = tuple(text for _, text in prompts(Asked("", "chat", 0, count)))
    shots = tuple(text for _, text in prompts(Asked("", "completions", 8, count)))
    return (
        Suite("chat", chat, answers=True),
        Suite("8-shot document", shots, answers=True),
        Suite("broken-off question", tuple(_broken_off(count)), answers=False),
    )


def _broken_off(count: int) -> Iterator[str]:
    for _, problem in exam(count, seed=2_025, shots=0):
        yield f"{family.BOS}{QUESTION} {' '.join(problem.question.split()[:4])}"


def greedy_answers(target: LanguageModel, tokenizer: Tokenizer, suite: Suite) -> list[Answered]:
    """Return the target's greedy tokens up to `<|end|>`; in documents, up to the blank line after the answer."""
    asked = [tokenizer.encode(text, add_special_tokens=False).ids for text in suite.prompts]
    asked.sort(key=len)
    end: int = tokenizer.encode(family.END, add_special_tokens=False).ids[0]
    blank: list[int] = tokenizer.encode(SHOT_END, add_special_tokens=False).ids if suite.answers else []
    answered = []
    per_batch = max(1, TOKENS_PER_BATCH // (len(asked[-1]) + MAX_NEW_TOKENS))
    for start in range(0, len(asked), per_batch):
        chosen = asked[start : start + per_batch]
        for ids, new in zip(chosen, greedy(target, chosen, 0, end, MAX_NEW_TOKENS), strict=True):
            answered.append(Answered([*ids, *_cut(new, blank)], len(ids)))
    return answered


def _cut(new: list[int], blank: list[int]) -> list[int]:
    for end in range(len(blank), len(new) + 1) if blank else ():
        if new[end - len(blank) : end] == blank:
            return new[:end]
    return new


@torch.inference_mode()
def proposals(
    head: Head, target: LanguageModel, ids: Tensor, steps: int, embeds: Tensor | None = None
) -> Tensor:
    """Return `[batch, steps, tokens]`: the target id that step k of a round at t proposes, as input of `oracle`.

    Sequences of a batch may be padded on the right, because attention is causal.
    """
    predictions = head.unroll(Shared.of(target), target_features(target, ids, embeds), ids, steps)
    chosen = [prediction.logits.argmax(-1) for prediction in predictions]
    if isinstance(head, Eagle3Head):
        chosen = [ids + head.d2t[ids] for ids in chosen]
    if isinstance(head, StandaloneHead):  # row s predicts x[s + 1]: step k at t is row t + 1 + k
        (said,) = chosen
        chosen = [torch.nn.functional.pad(said[:, 1 + k :], (0, 1 + k), value=-1) for k in range(steps)]
    return torch.stack(chosen, dim=1)


def rounds_of(head: Head, target: LanguageModel, answered: list[Answered], steps: int) -> list[Round]:
    """Return the rounds over all answers."""
    rounds = []
    longest = max(len(one.ids) for one in answered)
    per_batch = max(1, TOKENS_PER_BATCH // longest)
    for start in range(0, len(answered), per_batch):
        chosen = answered[start : start + per_batch]
        width = max(len(one.ids) for one in chosen)
        ids = torch.tensor([one.ids + [0] * (width - len(one.ids)) for one in chosen], device=target.device)
        read = [
            F.pad(one.embeds, (0, 0, 0, width - len(one.ids))) for one in chosen if one.embeds is not None
        ]
        proposed = proposals(head, target, ids, steps, torch.stack(read) if read else None)
        for one, row, its in zip(chosen, ids, proposed, strict=True):
            tokens = len(one.ids)
            rounds += walk(ok_matrix(its[:, :tokens], row[:tokens]), one.prompt_tokens)
    return rounds


def acceptance(
    name: str, head: Head, target: LanguageModel, answered: list[Answered], steps: int
) -> Acceptance:
    """Walk all answers of a suite with a number of draft steps."""
    rounds = rounds_of(head, target, answered, steps)
    best = [one for each in answered for one in walk(perfect(steps, len(each.ids)), each.prompt_tokens)]
    return Acceptance(
        name,
        len(answered),
        steps,
        accept_length(rounds),
        accept_length(best),
        accepted_at(rounds, steps),
    )


def measure(
    head: Head, target: LanguageModel, tokenizer: Tokenizer, count: int, steps: Sequence[int]
) -> Iterator[Acceptance]:
    """Yield the rows of the model card for each suite and number of steps, over all rounds."""
    for suite in suites(count):
        answered = greedy_answers(target, tokenizer, suite)
        for some in steps:
            yield acceptance(suite.name, head, target, answered, some)
