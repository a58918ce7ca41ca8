"""lm-eval: log-likelihoods by the server equal those of `transformers`, and generation by both APIs."""

from __future__ import annotations

import json
from typing import Any

from deploy.tiny_models.word_problems import take
from tests.clients.features import MODEL, V1, Features
from tests.clients.programs.command import DIRECTORY, MODEL_PATH, run

DOCUMENTS = 12
TOLERANCE = 1e-3
TASKS = DIRECTORY / "tasks"
# What the chat template makes of a question if the model is not to think: it answers with steps and the result.
CHAT_TEXT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
RUN_SECONDS = 700.0
features = Features(deadline=720)

CHOICES = """\
task: word_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{document}}}}"
target_delimiter: ""
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
            "document": CHAT_TEXT.format(each.question),
            "value": str(each.value),
            "choices": [each.answer, each.answer[: len(each.answer) // 2], "I do not know"],
        }
        for each in take(DOCUMENTS, 5, "heldout")
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, text in (("choice", CHOICES), ("rolling", ROLLING), ("generate", GENERATE)):
        (TASKS / f"{name}.yaml").write_text(text.format(file=file))


def evaluate(name: str, tasks: str, model: str, model_args: str, *more: str) -> None:
    """Run tasks; their results are in `out/NAME`. One run takes minutes: lm-eval reads all tasks that it brings."""
    output = DIRECTORY / "out" / name
    for old in output.rglob("*.json*"):
        old.unlink()
    run(
        "lm-eval",
        *("run", "--model", model, "--model_args", model_args, "--tasks", tasks, "--log_samples"),
        *("--include_path", str(TASKS), "--output_path", str(output), *more),
        seconds=RUN_SECONDS,
    )


def samples(name: str, task: str) -> list[Any]:
    """Return the responses to all documents of a task, in order."""
    [file] = (DIRECTORY / "out" / name).rglob(f"samples_{task}_*.jsonl")
    found = sorted(
        (json.loads(line) for line in file.read_text().splitlines()), key=lambda each: each["doc_id"]
    )
    return [each["resps"] for each in found]


def score(name: str, task: str, metric: str) -> float:
    [file] = (DIRECTORY / "out" / name).rglob("results_*.json")
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


def compare(task: str, count: int) -> None:
    """Compare the log-likelihoods of a task with those of `transformers`."""
    ours, theirs = flat(samples("server", task)), flat(samples("transformers", task))
    assert len(ours) == len(theirs) == count, (len(ours), len(theirs))
    worst = max(abs(a - b) for a, b in zip(ours, theirs))
    print(f"{task}: the largest difference is {worst}")
    assert worst < TOLERANCE, worst


@features.case("runs: local-completions")
def run_server() -> None:
    write_tasks()
    evaluate("server", "word_choice,word_rolling,word_generate", "local-completions", COMPLETIONS)


@features.case("runs: transformers, the reference")
def run_reference() -> None:
    evaluate("transformers", "word_choice,word_rolling", "hf", TRANSFORMERS, "--device", "cpu")


@features.case("loglikelihood equal to transformers")
def choices() -> None:
    compare("word_choice", 3 * DOCUMENTS)


@features.case("is_greedy equal to transformers")
def greedy() -> None:
    flags = [str(samples(name, "word_choice")).count("True") for name in ("server", "transformers")]
    assert flags[0] == flags[1] > 0, flags


@features.case("loglikelihood_rolling equal to transformers")
def rolling() -> None:
    compare("word_rolling", DOCUMENTS)


@features.case("generate_until: completions")
def generate() -> None:
    assert len(samples("server", "word_generate")) == DOCUMENTS


@features.case("generate_until: local-chat-completions")
def generate_chat() -> None:
    evaluate("chat", "word_generate", "local-chat-completions", CHAT, "--apply_chat_template")
    assert score("chat", "word_generate", "exact_match,marked") > 0.9


if __name__ == "__main__":
    features.run()
