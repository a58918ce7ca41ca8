"""Writes the README.md next to the weights of the vision model and of its draft."""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from pathlib import Path

from deploy.tiny_models.training_loop import Outcome
from deploy.tiny_models.vision.measure import Score


@dataclass(frozen=True, slots=True)
class Card:
    """The facts of a run."""

    parameters: int
    outcome: Outcome
    examples: int
    machine: str
    command: str


def write(directory: Path, card: Card, score: Score | None) -> None:
    """Write README.md of the vision model."""
    rows = "| not evaluated yet | | |"
    if score is not None:
        kinds = "\n".join(
            f"| {kind} | {n} | {score.right[kind] / n:.3f} |" for kind, n in sorted(score.asked.items())
        )
        rows = f"{kinds}\n| **all** | {score.asked.total()} | **{score.value:.3f}** |"
    outcome = card.outcome
    text = f"""---
library_name: transformers
pipeline_tag: image-text-to-text
---

# tandem tiny vision

A LLaVA (CLIP tower, projector, Llama) of {card.parameters / 1e6:.2f} M parameters that answers questions about drawn
pictures of 32 by 32 pixels: which handwritten digit, which colour, how many shapes, what is where; about one picture or
two. Trained from nothing so that images in prompts can be tried, tested and scored without a download. It knows nothing
else. A picture takes 16 tokens. Larger pictures are scaled to 32 pixels, as its processor says.

## Scores

Greedy, held-out digits and arrangements (a hash of the picture's contents keeps them out of the training data), weights
as stored (bf16), computed in fp32 by transformers. An answer is right when its numbers, colours and shapes are.

| question | asked | right |
|---|---|---|
{rows}

`deploy/eval URL --vision --count 1000 --seed 7` scores a running server in the same way.

## Training

- command: `{card.command}`
- date: {datetime.datetime.now(datetime.UTC).date().isoformat()}
- machine: {card.machine}
- {card.examples} questions, {outcome.tokens / 1e6:.0f} M tokens in {outcome.steps} steps, {outcome.seconds:.0f} seconds
- final loss: {outcome.loss:.4f}

Handwritten digits: E. Alpaydin, C. Kaynak, Optical Recognition of Handwritten Digits, UCI Machine Learning Repository,
CC BY 4.0, as bundled with scikit-learn. The schedule follows the clock, so a second run gives a similar model, not the
same one.
"""
    (directory / "README.md").write_text(text)
