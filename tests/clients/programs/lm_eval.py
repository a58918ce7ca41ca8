"""lm-eval: log-likelihoods by the server equal those of `transformers`, and generation by both APIs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from deploy.tiny_models.word_problems import take
from tests.clients.features import MODEL, V1, Features
from tests.clients.programs.command import DIRECTORY, MODEL_PATH, run

DOCUMENTS = 12
TOLERANCE = 1e-3
TASKS = DIRECTORY / "tasks"
features = Features(deadline=400)

CHOICES = """\
task: word_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: choices
doc_to_target: 0
metric_list: [{{metric: acc}}]
"""
ROLLING = """\
task: word_rolling
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{question}}}}"
metric_list: [{{metric: word_perplexity}}]
"""
GENERATE = """\
task: word_generate
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{value}}}}"
generation_kwargs: {{until: ["Question:"], max_gen_toks: 64, temperature: 0}}
filter_list:
  - name: marked
    filter: [{{function: regex, regex_pattern: "#### (\\\\d+)"}}, {{function: take_first}}]
metric_list: [{{metric: exact_match}}]
"""


def write_tasks() -> None:
    TASKS.mkdir(exist_ok=True)
    file = TASKS / "problems.jsonl"
    rows = [
        {
            "question": each.question,
            "value": str(each.value),
            "choices": [each.answer, each.answer[: len(each.answer) // 2], "I do not know"],
        }
        for each in take(DOCUMENTS, 5, "heldout")
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, text in (("choice", CHOICES), ("rolling", ROLLING), ("generate", GENERATE)):
        (TASKS / f"{name}.yaml").write_text(text.format(file=file))


def evaluate(name: str, task: str, model: str, model_args: str, *more: str) -> tuple[Path, str]:
    """Run a task and return the folder of its results, and the output."""
    output = DIRECTORY / "out" / name
    for old in output.rglob("*.json*"):
        old.unlink()
    said = run(
        "lm-eval",
        *("run", "--model", model, "--model_args", model_args, "--tasks", task, "--log_samples"),
        *("--include_path", str(TASKS), "--output_path", str(output), *more),
        seconds=390,
    )
    return output, said


def samples(output: Path) -> list[Any]:
    """Return the responses of all documents, in order."""
    [file] = output.rglob("samples_*.jsonl")
    found = sorted(
        (json.loads(line) for line in file.read_text().splitlines()), key=lambda each: each["doc_id"]
    )
    return [each["resps"] for each in found]


def score(output: Path, task: str, metric: str) -> float:
    [file] = output.rglob("results_*.json")
    return float(json.loads(file.read_text())["results"][task][metric])


COMPLETIONS = f"model={MODEL},base_url={V1}/completions,tokenizer={MODEL_PATH},num_concurrent=4,max_retries=1"
CHAT = f"model={MODEL},base_url={V1}/chat/completions,num_concurrent=4,max_retries=1"
TRANSFORMERS = f"pretrained={MODEL_PATH},dtype=float32"


def flat(value: Any) -> list[float]:
    """Return the numbers of nested lists; lm-eval writes those of its samples as texts."""
    if isinstance(value, list):
        return [number for each in value for number in flat(each)]
    try:
        return [float(value)]
    except ValueError:
        return []


@features.case("loglikelihood equal to transformers")
def choices() -> None:
    write_tasks()
    ours, _ = evaluate("choice", "word_choice", "local-completions", COMPLETIONS)
    theirs, _ = evaluate("choice-hf", "word_choice", "hf", TRANSFORMERS, "--device", "cpu")
    ours_found, theirs_found = flat(samples(ours)), flat(samples(theirs))
    assert len(ours_found) == len(theirs_found) == 3 * DOCUMENTS, (len(ours_found), len(theirs_found))
    worst = max(abs(a - b) for a, b in zip(ours_found, theirs_found))
    print("largest difference", worst)
    assert worst < TOLERANCE, worst


@features.case("is_greedy equal to transformers")
def greedy() -> None:
    kinds = [
        str([each for row in samples(DIRECTORY / "out" / name) for each in row])
        for name in ("choice", "choice-hf")
    ]
    flags = [text.count("True") for text in kinds]
    assert flags[0] == flags[1] > 0, flags


@features.case("loglikelihood_rolling equal to transformers")
def rolling() -> None:
    ours, _ = evaluate("rolling", "word_rolling", "local-completions", COMPLETIONS)
    theirs, _ = evaluate("rolling-hf", "word_rolling", "hf", TRANSFORMERS, "--device", "cpu")
    found = list(zip(flat(samples(ours)), flat(samples(theirs))))
    assert len(found) == DOCUMENTS
    assert max(abs(a - b) for a, b in found) < TOLERANCE, found


@features.case("generate_until: completions")
def generate() -> None:
    output, _ = evaluate("generate", "word_generate", "local-completions", COMPLETIONS)
    assert len(samples(output)) == DOCUMENTS


@features.case("generate_until: chat")
def generate_chat() -> None:
    output, _ = evaluate(
        "generate-chat", "word_generate", "local-chat-completions", CHAT, "--apply_chat_template"
    )
    assert score(output, "word_generate", "exact_match,marked") > 0.9


if __name__ == "__main__":
    features.run()
