"""The task: deterministic, correct, and with a held-out split that training never sees."""

from __future__ import annotations

import re
from itertools import islice

import pytest

from deploy.tiny_models.corpus import DocumentSource, WindowKind
from deploy.tiny_models.prompts import few_shot_prompt
from deploy.tiny_models.templates import LARGEST, NAMES, OBJECTS, TEMPLATES
from deploy.tiny_models.tokenizer import build
from deploy.tiny_models.word_problems import (
    Problem,
    apply,
    exam,
    is_right,
    marked_number,
    problems,
    split_of,
    take,
)


def test_the_same_seed_gives_the_same_problems() -> None:
    assert take(50, 3, "train") == take(50, 3, "train")
    assert take(50, 3, "train") != take(50, 4, "train")


def test_no_question_is_in_both_splits() -> None:
    train = {p.question for seed in range(3) for p in islice(problems(seed, "train"), 2000)}
    heldout = {p.question for seed in range(3) for p in take(300, seed, "heldout")}
    assert not train & heldout
    assert all(split_of(question) == "train" for question in train)
    assert all(split_of(question) == "heldout" for question in heldout)


def test_the_split_is_the_same_in_every_process() -> None:
    """The split is pinned: with another hash, a trained model's held-out problems would include training problems."""
    assert [n for n in range(40) if split_of(f"question {n}") == "heldout"] == [4, 17, 20]


def test_answers_recompute_and_stay_in_range() -> None:
    line = re.compile(r"(\d+) ([-+*/]) (\d+) = (\d+)")
    seen: set[str] = set()
    for problem in islice(problems(1, "train"), 5000):
        *steps, last = problem.answer.split("\n")
        assert 2 <= len(steps) <= 4
        for step in steps:
            match = line.fullmatch(step)
            assert match, step
            a, op, b, value = int(match[1]), match[2], int(match[3]), int(match[4])
            assert apply(a, op, b) == value
            assert all(0 <= number <= LARGEST for number in (a, b, value))
        assert last == f"#### {problem.value}" == f"#### {value}"
        seen.add(problem.template)
    assert seen == set(TEMPLATES)


def test_the_answer_is_a_function_of_the_question() -> None:
    answers: dict[str, str] = {}
    for problem in islice(problems(2, "train"), 5000):
        assert answers.setdefault(problem.question, problem.answer) == problem.answer


def test_both_wordings_of_every_template_occur() -> None:
    openings: dict[str, set[str]] = {name: set() for name in TEMPLATES}
    words = re.compile("|".join([*NAMES, *OBJECTS, r"\d+"]))
    for problem in islice(problems(5, "train"), 1000):
        openings[problem.template].add(words.sub("_", problem.question))
    assert {name: len(found) for name, found in openings.items()} == dict.fromkeys(TEMPLATES, 2)


def test_inexact_division_is_a_template_error() -> None:
    with pytest.raises(ValueError, match="has a remainder"):
        apply(7, "/", 2)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        (" 3 + 4 = 7\n#### 7", 7),
        ("####12<|end|>", 12),
        ("#### -3", -3),
        ("#### 7\n\nQuestion: ...\nAnswer: #### 9", 7),
        ("3 + 4 = 7", None),
        ("#### seven", None),
        ("", None),
    ],
)
def test_the_score_reads_the_first_marked_number(text: str, number: int | None) -> None:
    assert marked_number(text) == number
    assert is_right(Problem("t", "q", "a", 7), text) == (number == 7)


def test_an_exam_has_distinct_held_out_problems() -> None:
    sheet = list(exam(20, seed=9, shots=3))
    questions = [p.question for shots, problem in sheet for p in (*shots, problem)]
    assert len(sheet) == 20
    assert len(set(questions)) == 80
    assert all(split_of(question) == "heldout" for question in questions)


def test_a_few_shot_prompt_ends_where_the_answer_begins() -> None:
    first, second = take(2, 1, "heldout")
    prompt = few_shot_prompt([first], second.question)
    expected = f"Question: {first.question}\nAnswer: {first.answer}\n\nQuestion: {second.question}\nAnswer:"
    assert prompt == expected


def test_training_windows_begin_with_a_document_and_hold_no_held_out_question() -> None:
    tokenizer = build(sample=2000)
    kind = WindowKind(window=512, share=1.0, most_shots=4, many=0.3)
    windows = DocumentSource(tokenizer, seed=4).windows(kind, rows=24)
    assert windows.ids.shape == windows.weights.shape == (24, 513)
    assert set(windows.weights.flatten().tolist()) == {1, 10}
    asked = re.compile(r"(?:<\|user\|>|Question:) (.+?\?)(?=<\|end\|>|\nAnswer:)")
    questions = [q for row in windows.ids.tolist() for q in asked.findall(tokenizer.decode(row, False))]
    assert len(questions) > 40
    assert all(split_of(question) == "train" for question in questions)
