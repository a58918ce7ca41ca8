"""Writes the README.md next to the weights of the model that calls tools."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from deploy.tiny_models import model_card
from deploy.tiny_models.tool_calls.exam import ToolScore
from deploy.tiny_models.training_loop import Outcome


@dataclass(frozen=True, slots=True)
class ToolCard:
    """The facts that are known before the evaluation."""

    parameters: int
    outcome: Outcome
    machine: str
    command: str


def _share(score: ToolScore) -> str:
    return f"{score.valid:.3f}" if score.calls else "-"


def write(directory: Path, card: ToolCard, scores: Sequence[ToolScore]) -> None:
    """Write README.md."""
    rows = [
        f"| {score.name} | {score.asked.total()} | {score.calls} | {_share(score)} | {score.value:.3f} |"
        for score in scores
    ]
    table = "\n".join(rows) if rows else "| not evaluated yet | | | | |"
    kinds = "\n".join(
        f"- {score.name}: "
        + ", ".join(f"{kind} {score.right[kind]}/{n}" for kind, n in sorted(score.asked.items()))
        for score in scores
    )
    outcome = card.outcome
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    text = f"""---
library_name: transformers
pipeline_tag: text-generation
---

# tandem {directory.name}

A Qwen3 (dense) with {card.parameters / 1e6:.2f} M parameters that calls tools and thinks before it answers.

It reads the tools of the request, thinks a sentence within `<think>`, calls them in the form of Qwen3 and says
what they return. It solves word problems and arithmetic by a calculator, looks things up (weather, prices, phone
numbers, ...), makes several calls at once, and answers without a call where no tool fits; without a calculator it
computes word problems as `tiny-target` does. It knows nothing else. It was trained from scratch, so that tool calls
and reasoning can be tried and tested without a download. `enable_thinking: false` turns the thought off.

## Scores

Greedy, held-out questions, weights as stored (bf16), computed in fp32; calls go to real tools, whose results the model
reads. A call is valid if an offered tool takes its arguments.

| suite | conversations | calls | valid | right answers |
|---|---|---|---|---|
{table}

By kind of question:

{kinds or "- not evaluated yet"}

`deploy/eval URL --tools --count 200 --seed 7` scores a running server in the same way.

## Training

- command: `{card.command}`
- commit: {model_card.commit()}
- date: {today}
- machine: {card.machine}
- {outcome.tokens / 1e6:.1f} M tokens in {outcome.steps} steps, {outcome.seconds:.0f} seconds
- final loss: {outcome.loss:.4f} (weighted: what the model writes 1.0, questions 0.1, everything else 0)

The data is generated while training and the schedule follows the clock, so a second run gives a similar
model, not the same one.
"""
    (directory / "README.md").write_text(text)
