"""Writes the README.md next to a draft's weights."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from deploy.tiny_models.drafts.measure import Acceptance
from deploy.tiny_models.drafts.shapes import Kind
from deploy.tiny_models.training_loop import Outcome

_WHAT: dict[Kind, str] = {
    "eagle3": """An EAGLE-3 head: `fc` fuses the residual stream entering three of the target's layers (see
`eagle_config` in config.json; `aux_layer_convention: boundary`, so id i is `hidden_states[i]` of transformers).
One layer over concat(input_layernorm(embedding of the next token), hidden_norm(h)), residual h. The layer's
output before `norm` is the next step's h. Own head over 256 tokens; `target id = draft id + d2t[draft id]`.
The embedding is the target's.""",
    "eagle": """An EAGLE-1/2 head: `fc` over concat(embedding of the next token, hidden state after the target's
final norm), one layer without a norm before attention, no final norm. Embedding and head are the target's. The
layer's output is both what the target's head reads and the next step's hidden state.""",
    "mtp": """Three chained modules of multi-token prediction in DeepSeek's naming, with dense layers: module k is
`model.layers.{8 + k}`. It reads eh_proj(concat(enorm(embedding of token t+1+k), hnorm(h))), h being the target's
hidden state after its final norm for the first module, and the output of the module before it, after its
`shared_head.norm`, for the others (`mtp_chain: true`). Embedding and head are the target's. Position 0 is not
masked.""",
    "standalone": """A small Llama with the target's tokenizer. It reads the text and nothing of the target.""",
}

_FIGURES = "## Accept length\n\n"
_TRAINING = "## Training\n\n"
_EXPLAINED = """\
Tokens per verify step, bonus included; greedy chain; held-out problems, the target's own greedy text; weights as
stored (bf16), computed in fp32. From the oracle (`deploy/tiny_models/drafts/oracle.py`). "Most" is what a draft that is
always right would get: answers end in the middle of a round. Last column: share of rounds in which the draft of
step 1, 2, ... was accepted.

| suite | problems | steps | accept length | most | accepted at step |
|---|---|---|---|---|---|
"""


@dataclass(frozen=True, slots=True)
class Card:
    """The facts that are known before the measurement."""

    kind: Kind
    parameters: int
    unrolled: int
    outcome: Outcome
    machine: str
    command: str
    target: str = "tiny-target"
    measured_by: str = "deploy/tiny_models/drafts/measure.py"


def write(directory: Path, card: Card) -> None:
    """Write README.md without figures."""
    outcome = card.outcome
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    unrolled = "next token" if card.kind == "standalone" else f"mean over {card.unrolled} unrolled steps"
    text = f"""---
library_name: transformers
pipeline_tag: text-generation
---

# tandem {directory.name}

A draft of {card.parameters / 1e6:.2f} M parameters for `{card.target}`, for speculative decoding.

{_WHAT[card.kind]}

{_FIGURES}not measured yet

{_TRAINING}- command: `{card.command}`
- date: {today}
- machine: {card.machine}
- soft cross-entropy against the frozen target, {unrolled}
- {outcome.tokens / 1e6:.1f} M tokens in {outcome.steps} steps, {outcome.seconds:.0f} seconds
- final loss: {outcome.loss:.4f}

`deploy/tiny_models/drafts/reference.py` has this draft in plain eager torch, `{card.measured_by}` the measurement.
The data is generated while training and the schedule follows the clock, so a second run gives a similar draft, not the
same one.
"""
    (directory / "README.md").write_text(text)


def write_figures(directory: Path, measured: Sequence[Acceptance]) -> None:
    """Insert the measured accept lengths into README.md, replacing earlier ones."""
    rows = [
        f"| {one.suite} | {one.count} | {one.steps} | {one.length:.3f} | {one.most:.3f} | "
        f"{' '.join(f'{share:.3f}' for share in one.per_step)} |\n"
        for one in measured
    ]
    path = directory / "README.md"
    before, rest = path.read_text().split(_FIGURES)
    _, after = rest.split(_TRAINING)
    path.write_text(f"{before}{_FIGURES}{_EXPLAINED}{''.join(rows)}\n{_TRAINING}{after}")
