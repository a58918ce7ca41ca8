"""A guess changes how long the reference takes, and never what it says."""

from __future__ import annotations

import pytest

from router.tokens.tokenizer import Tokenizer
from tests.cluster.conftest import Reference, prompt_of

LENGTH, MORE = 12, 3
PROMPTS = [prompt_of(20, seed) for seed in range(1, 4)]
PART_OF_CHARACTER = "\ufffd"  # the text of each token whose bytes are not whole characters


@pytest.fixture(scope="module")
def generating(tokenizer: Tokenizer) -> Reference:
    """Return a reference that has generated its continuations."""
    reference = Reference(tokenizer)
    for prompt in PROMPTS:
        reference(prompt, LENGTH + MORE)
    return reference


def test_a_right_guess_is_confirmed_and_continued(tokenizer: Tokenizer, generating: Reference) -> None:
    guessing = Reference(tokenizer)
    for prompt in PROMPTS:
        texts = generating(prompt, LENGTH)
        assert guessing(prompt, LENGTH, texts) == texts
        assert guessing.ids(prompt, LENGTH + MORE) == generating.ids(prompt, LENGTH + MORE)


@pytest.mark.parametrize("place", [0, LENGTH // 2, LENGTH - 1])
@pytest.mark.parametrize("other", ["<|pad|>", PART_OF_CHARACTER, "no token has this text"])
def test_a_wrong_guess_is_not(place: int, other: str, tokenizer: Tokenizer, generating: Reference) -> None:
    texts = generating(PROMPTS[0], LENGTH)
    wrong = [*texts]
    wrong[place] = other
    assert wrong != texts
    assert Reference(tokenizer)(PROMPTS[0], LENGTH, wrong) == texts


def test_a_guess_of_another_length_is_ignored(tokenizer: Tokenizer, generating: Reference) -> None:
    guessing = Reference(tokenizer)
    for prompt, change in zip(PROMPTS[1:], (-1, 1), strict=True):
        texts = generating(prompt, LENGTH)
        assert guessing(prompt, LENGTH, [*texts, "a"][: LENGTH + change]) == texts
