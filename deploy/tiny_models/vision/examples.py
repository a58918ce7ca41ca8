"""Questions as training examples: ids with placeholders, loss weights and pictures, built on all cores at the start."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from deploy.tiny_models import tokenizer as family
from deploy.tiny_models.vision.digits import Split
from deploy.tiny_models.vision.questions import Question, questions
from deploy.tiny_models.vision.scenes import SIDE

LONGEST = 144  # tokens of an example; the longest actual one has 130
IMAGE_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Examples:
    """N examples with M pictures; the pictures of one example are consecutive."""

    ids: NDArray[np.uint16]  # [N, LONGEST], padded on the right
    weights: NDArray[np.uint8]  # [N, LONGEST], tenths; the weight of predicting the token
    first_image: NDArray[np.int64]  # [N]
    num_images: NDArray[np.int64]  # [N]
    images: NDArray[np.uint8]  # [M, SIDE, SIDE, 3]


def prompt(question: Question) -> str:
    """Return the prompt as the chat template renders it, with a placeholder for each token of a picture."""
    return (
        f"{family.BOS}{family.USER}{family.IMAGE * IMAGE_TOKENS * len(question.images)} {question.text}{family.END}\n"
        f"{family.ASSISTANT}"
    )


def make(seed: int, split: Split, count: int, tokenizer_json: str) -> Examples:
    """Build `count` examples in this process."""
    tokenizer = Tokenizer.from_str(tokenizer_json)
    ids = np.zeros((count, LONGEST), dtype=np.uint16)
    weights = np.zeros((count, LONGEST), dtype=np.uint8)
    counts = np.zeros(count, dtype=np.int64)
    images: list[NDArray[np.uint8]] = []
    for row, question in enumerate(islice(questions(seed, split), count)):
        asked = tokenizer.encode(prompt(question), add_special_tokens=False).ids
        said = tokenizer.encode(f" {question.answer}{family.END}", add_special_tokens=False).ids
        length = len(asked) + len(said)
        ids[row, :length] = asked + said
        weights[row, len(asked) : length] = 10
        counts[row] = len(question.images)
        images += question.images
    pictures = np.stack(images) if images else np.zeros((0, SIDE, SIDE, 3), dtype=np.uint8)
    return Examples(ids, weights, np.cumsum(counts) - counts, counts, pictures)


def make_all(seed: int, count: int, tokenizer: Tokenizer, workers: int) -> Examples:
    """Build `count` training examples in `workers` processes, each with its own questions."""
    share = -(-count // workers)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        text = tokenizer.to_str()
        jobs = [pool.submit(make, seed * 1000 + n, "train", share, text) for n in range(workers)]
        parts = [job.result() for job in jobs]
    offsets = np.cumsum([0, *(len(part.images) for part in parts[:-1])])
    return Examples(
        np.concatenate([part.ids for part in parts]),
        np.concatenate([part.weights for part in parts]),
        np.concatenate([part.first_image + offset for part, offset in zip(parts, offsets, strict=True)]),
        np.concatenate([part.num_images for part in parts]),
        np.concatenate([part.images for part in parts]),
    )
