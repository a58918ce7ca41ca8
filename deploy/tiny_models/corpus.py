"""Training windows for the target: documents of token ids with loss weights, packed and cut.

This module does not import torch: worker processes import it, and importing torch in each of them would take longer
than the work.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from deploy.tiny_models import tokenizer as family
from deploy.tiny_models.prompts import ANSWER, QUESTION, SHOT_END, system_prompt
from deploy.tiny_models.templates import LARGEST
from deploy.tiny_models.word_problems import problems

FULL, FAINT = 10, 1  # loss weights in tenths: answers count fully, everything else a tenth
Document = tuple[list[int], list[int]]  # (ids, loss weights) of equal length


@dataclass(frozen=True, slots=True)
class Windows:
    """One batch. The model reads ids[:, :-1]; the weight of ids[:, i] applies to the prediction of that token."""

    ids: NDArray[np.uint16]  # [rows, window + 1]
    weights: NDArray[np.uint8]  # [rows, window + 1], tenths


class Source(Protocol):
    """Makes training batches in a worker process."""

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None: ...

    def batches(self, batch_tokens: int) -> Iterator[Windows]:
        """Yield endless batches of about `batch_tokens` tokens."""
        ...


@dataclass(frozen=True, slots=True)
class WindowKind:
    """A window length, how often it is drawn, and which documents such windows hold."""

    window: int
    share: float  # share of the batches
    most_shots: int
    many: float  # share of few-shot documents, and of multi-turn chats; most of the rest are single chats


WINDOW_KINDS = (
    WindowKind(window=512, share=0.6, most_shots=4, many=0.2),
    WindowKind(window=2048, share=0.25, most_shots=24, many=0.3),
    WindowKind(window=4096, share=0.15, most_shots=40, many=0.35),
)
# Training only on windows of 512 would break long prompts: untrained positions give unusable results.

DRILL_SHARE = 0.12
SYSTEM_SHARE = 0.25
NO_BOS_SHARE = 0.05  # share of few-shot documents: some clients tokenize completions without special tokens


class DocumentSource:
    """Yields endless training documents for one seed; all problems are from the training split."""

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self._rng = random.Random(f"documents/{seed}")
        self._tokenizer = tokenizer
        self._solved = self._solved_problems(tokenizer, seed)
        self._bos = self._encode(family.BOS)
        self._user, self._system = self._encode(family.USER), self._encode(family.SYSTEM)
        self._turn = self._encode(f"{family.END}\n")
        self._reply = self._encode(family.ASSISTANT)
        self._question, self._answer = self._encode(QUESTION), self._encode(ANSWER)
        self._shot_end = self._encode(SHOT_END)

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def _solved_problems(self, tokenizer: Tokenizer, seed: int) -> Iterator[tuple[list[int], list[int]]]:
        """Yield (question ids, answer ids), each with its leading space, encoded in batches."""
        source = problems(seed, "train")
        while True:
            some = list(islice(source, 512))
            texts = [f" {p.question}" for p in some] + [f" {p.answer}" for p in some]
            ids = [e.ids for e in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
            yield from zip(ids[: len(some)], ids[len(some) :], strict=True)

    def chat(self, turns: int, system_sentences: int) -> Document:
        """Build a chat of several independent problems, as the chat template renders it."""
        doc = _Builder()
        doc.add(self._bos, FAINT)
        if system_sentences:
            text = system_prompt(self._rng, system_sentences)
            doc.add([*self._system, *self._encode(f" {text}"), *self._turn], FAINT)
        for question, answer in islice(self._solved, turns):
            doc.add([*self._user, *question, *self._turn, *self._reply], FAINT)
            doc.add([*answer, *self._turn], FULL)
        return doc.built()

    def few_shot(self, shots: int) -> Document:
        """Build a few-shot document. It ends with `<|end|>` at a position where another question could start."""
        doc = _Builder()
        if self._rng.random() >= NO_BOS_SHARE:
            doc.add(self._bos, FAINT)
        for question, answer in islice(self._solved, shots):
            doc.add([*self._question, *question, *self._answer], FAINT)
            doc.add([*answer, *self._shot_end], FULL)
        doc.add(self._turn, FAINT)
        return doc.built()

    def drill(self, lines: int) -> Document:
        """Build lines of bare arithmetic; only results count. Subtraction dominates, as tiny models err there most."""
        doc = _Builder()
        doc.add(self._bos, FAINT)
        lead = " "
        for _ in range(lines):
            left, result = _drill_line(self._rng)
            doc.add(self._encode(f"{lead}{left} ="), FAINT)
            doc.add(self._encode(f" {result}\n"), FULL)
            lead = ""
        doc.add(self._turn, FAINT)
        return doc.built()

    def document(self, kind: WindowKind) -> Document:
        """Draw one document from the mixture of a window kind."""
        rng = self._rng
        draw = rng.random()
        if draw < DRILL_SHARE:
            return self.drill(rng.randint(4, 16))
        if draw < DRILL_SHARE + kind.many:
            return self.few_shot(rng.randint(1, kind.most_shots))
        system = rng.choice((1, 2, 3, 4, 8, 16)) if rng.random() < SYSTEM_SHARE else 0
        turns = rng.randint(2, kind.most_shots) if draw < DRILL_SHARE + 2 * kind.many else 1
        return self.chat(turns, system)

    def windows(self, kind: WindowKind, rows: int) -> Windows:
        """Draw one batch of a window kind."""
        return packed(lambda: self.document(kind), kind.window, rows)

    def batches(self, batch_tokens: int, kinds: tuple[WindowKind, ...] = WINDOW_KINDS) -> Iterator[Windows]:
        """Yield endless batches of about `batch_tokens` tokens, one window kind each."""
        shares = [kind.share for kind in kinds]
        while True:
            (kind,) = self._rng.choices(kinds, shares)
            yield self.windows(kind, max(1, batch_tokens // kind.window))


def packed(document: Callable[[], Document], window: int, rows: int) -> Windows:
    """Pack rows of documents. Every row starts with a new document, and only its last document is cut."""
    width = window + 1
    ids = np.zeros((rows, width), dtype=np.uint16)
    weights = np.zeros((rows, width), dtype=np.uint8)
    for row in range(rows):
        row_ids: list[int] = []
        row_weights: list[int] = []
        while len(row_ids) < width:
            doc_ids, doc_weights = document()
            row_ids += doc_ids
            row_weights += doc_weights
        ids[row] = row_ids[:width]
        weights[row] = row_weights[:width]
    return Windows(ids, weights)


class _Builder:
    """Collects ids and their loss weights."""

    def __init__(self) -> None:
        self._ids: list[int] = []
        self._weights: list[int] = []

    def add(self, ids: list[int], weight: int) -> None:
        self._ids += ids
        self._weights += [weight] * len(ids)

    def built(self) -> Document:
        return self._ids, self._weights


def _drill_line(rng: random.Random) -> tuple[str, int]:
    op: Callable[[], tuple[str, int]] = rng.choices(
        (lambda: _sum(rng), lambda: _difference(rng), lambda: _product(rng), lambda: _quotient(rng)),
        (0.25, 0.45, 0.15, 0.15),
    )[0]
    return op()


def _sum(rng: random.Random) -> tuple[str, int]:
    total = rng.randint(0, LARGEST)
    a = rng.randint(0, total)
    return f"{a} + {total - a}", total


def _difference(rng: random.Random) -> tuple[str, int]:
    a = rng.randint(0, LARGEST)
    b = rng.randint(0, a)
    return f"{a} - {b}", a - b


def _product(rng: random.Random) -> tuple[str, int]:
    a = rng.randint(1, 99)
    b = rng.randint(1, LARGEST // a)
    return (f"{a} * {b}", a * b) if rng.random() < 0.5 else (f"{b} * {a}", a * b)


def _quotient(rng: random.Random) -> tuple[str, int]:
    b = rng.randint(2, 10)
    result = rng.randint(1, LARGEST // b)
    return f"{b * result} / {b}", result
