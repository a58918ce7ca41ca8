"""One draft model for one target: shapes and widths. common/speculation reads it from a directory. No torch.

The widths of everything that target and draft exchange come only from functions here: `target_width` (passed by the
target per token), `hidden_size_for` (passed by one draft step to the next), and `proposals_for` and `hidden_rows_for`
(sent with a request). The engine uses them through the types that have these widths
(common/engine/forward/draft_inputs.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from common.checkpoint import model_files
from common.checkpoint.aux_layers import AuxLayers
from common.checkpoint.model_config import ModelConfig
from common.checkpoint.mtp_format import MtpFormat
from common.errors import ModelError

DRAFT_REMEDY = "use a draft made for the target, or none"


@dataclass(frozen=True, slots=True)
class DraftConfig:
    """One draft model for one target."""

    algorithm: str  # name of the algorithm's record
    model: ModelConfig  # shapes of the draft's own layers
    target_hidden: int  # width of the target's hidden state; 0: the draft reads none
    aux: AuxLayers  # streams of the target that the draft reads
    draft_vocab: int | None  # number of tokens that the draft can propose; None: all, by the target's head
    norm_before_residual: bool  # the residual around attention is the normed stream
    mtp: MtpFormat | None = None  # set for MTP: names of its model.num_layers modules
    repeats: bool = False  # MTP: the only module runs at every step, like a head
    fc_norms: tuple[str, ...] = ()  # norms of the target's states, one for each equal part of them
    norm_output: bool = False  # a draft step passes its normed output to the next

    @property
    def modules(self) -> int:
        """The number of MTP modules that draft, one per step; 0 if the same layers run at every step."""
        return 0 if self.mtp is None or self.repeats else self.model.num_layers

    @property
    def reduced_vocab(self) -> bool:
        """True if the draft proposes only some of the tokens, by an LM head of its own."""
        return self.draft_vocab not in (None, self.model.vocab_size)

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """Boundaries of the target whose streams the draft reads; () for the normed output."""
        return self.aux.boundaries


def with_steps(draft: DraftConfig, steps: int) -> DraftConfig:
    """Return the draft for this many steps: of several MTP modules the first ones, one per step.

    Most MTP checkpoints have one module, which runs at every step. Of several, each has the KV of its own step and does
    not run at others. Raises ModelError if there are several, but fewer than steps.
    """
    if draft.mtp is None:
        return draft
    if draft.model.num_layers == 1:
        return replace(draft, repeats=True)
    if steps > draft.modules:
        raise ModelError(
            f"this draft has {draft.modules} modules, one for each step: set speculation.steps to at most "
            f"{draft.modules}, not {steps}; only the module of a draft with one runs at several steps"
        )
    model = replace(
        draft.model,
        num_layers=steps,
        sliding_windows=draft.model.sliding_windows[:steps],
        layer_kinds=draft.model.layer_kinds[:steps],
    )
    return replace(draft, model=model)


def quantized_draft(draft: DraftConfig, quantization: str) -> DraftConfig:
    """Return the draft with weights quantised as `ModelConfig.quantized` does. Raises ConfigError."""
    return replace(draft, model=draft.model.quantized(quantization, "speculation.draft_quantization"))


def target_width(draft: DraftConfig) -> int:
    """Return the hidden values per token that the draft reads from the target; 0: none."""
    return draft.target_hidden * max(1, len(draft.aux_layers))


def hidden_size_for(draft: DraftConfig) -> int:
    """Return the hidden values that a draft step passes to the next one; 0: none."""
    if draft.modules and draft.mtp is not None and not draft.mtp.chain:
        return draft.target_hidden  # what every module reads
    return draft.model.hidden_size if draft.target_hidden else 0


def module_input_for(draft: DraftConfig, step: int) -> int:
    """Return the hidden values that MTP module `step` reads."""
    return hidden_size_for(draft) if step else target_width(draft)


def hidden_rows_for(draft: DraftConfig) -> int:
    """Return the hidden states sent with a request: the newest, or one per module but the first (see models/mtp.py)."""
    if not draft.target_hidden:
        return 0
    return draft.modules - 1 if draft.modules else 1


def proposals_for(draft: DraftConfig, topk: int) -> int:
    """Return the drafts sent with a request: those of the first step, or of all steps if each has its module."""
    return topk * max(draft.modules, 1) if draft.target_hidden else 0


def lookahead_for(draft: DraftConfig) -> int:
    """Return how many tokens after a position its draft KV depends on."""
    return max(draft.modules, 1) if draft.target_hidden else 0


def draft_fingerprint(path: str | Path, draft: DraftConfig, steps: int, topk: int) -> str:
    """Return the value that nodes compare in addition to the target's fingerprint: weights, widths, shape of
    drafting.
    """
    facts = (draft.algorithm, steps, topk, draft.aux_layers, target_width(draft), hidden_size_for(draft))
    # How the layers were determined does not affect what is computed.
    return model_files.fingerprint(Path(path), repr((facts, replace(draft, aux=AuxLayers(draft.aux_layers)))))


def check_same(file: Path, what: str, ours: int, theirs: int) -> None:
    """Raise ModelError if the draft's value of `what` differs from the target's."""
    if ours != theirs:
        raise ModelError(
            f"{file}: {what} is {ours}, the target has {theirs}: this draft is for another model; {DRAFT_REMEDY}"
        )
