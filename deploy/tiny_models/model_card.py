"""Writes the README.md next to the weights: what the model is, how it was trained, what it scored."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers

from deploy.tiny_models.greedy_eval import Score
from deploy.tiny_models.training_loop import Outcome


@dataclass(frozen=True, slots=True)
class Card:
    """The facts that are known before the evaluation."""

    parameters: int
    outcome: Outcome
    machine: str
    command: str
    title: str = "tandem tiny target"
    what: str = "A Llama"
    more: str = ""  # a section of its own, before the training


def parameters(module: torch.nn.Module) -> int:
    """Count the parameters of a model."""
    return sum(parameter.numel() for parameter in module.parameters())


def machine(device: torch.device) -> str:
    """Describe the machine."""
    chip = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    libraries = f"torch {torch.__version__}, transformers {transformers.__version__}"
    return f"{chip}, {os.cpu_count()} CPU cores, {libraries}"


def commit() -> str:
    """Name the commit of the training program."""
    try:
        found = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown (no git checkout on the training machine)"
    return found.stdout.strip()


def write(directory: Path, card: Card, scores: list[Score]) -> None:
    """Write README.md. Called again after every suite."""
    rows = [
        f"| {score.suite.name} | {score.suite.count} | {score.prompt_tokens} | {score.value:.3f} |"
        for score in scores
    ]
    table = "\n".join(rows) if rows else "| not evaluated yet | | | |"
    outcome = card.outcome
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    text = f"""---
library_name: transformers
pipeline_tag: text-generation
---

# {card.title}

{card.what} with {card.parameters / 1e6:.2f} M parameters.

It solves generated grade-school word problems and knows nothing else. It was trained from scratch, so that a
disaggregated cluster can be tried, tested and scored without a download.

Prompts are chat messages, or documents `Question: ...\\nAnswer: ...` with a blank line between problems (see
`deploy/tiny_models/prompts.py`). An answer is one calculation on each line and a last line `#### number`.

## Scores

Greedy, held-out problems (a hash of the question keeps them out of the training data), weights as stored
(bf16), computed in fp32, the number after `####`.

| suite | problems | prompt tokens (mean) | right |
|---|---|---|---|
{table}

`deploy/eval URL --count 1000 --seed 7` scores a running server in the same way.
{card.more}
## Training

- command: `{card.command}`
- commit: {commit()}
- date: {today}
- machine: {card.machine}
- {outcome.tokens / 1e6:.1f} M tokens in {outcome.steps} steps, {outcome.seconds:.0f} seconds
- final loss: {outcome.loss:.4f} (weighted: answers 1.0, everything else 0.1)

The data is generated while training and the schedule follows the clock, so a second run gives a similar
model, not the same one.
"""
    (directory / "README.md").write_text(text)
