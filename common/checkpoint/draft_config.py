"""One draft model for one target: shapes and widths. common/speculation reads it from a directory. No torch.

The widths of everything that passes between target and draft come from functions here and from nowhere else:
`target_width` (what the target gives per token), `hidden_size_for` (what one draft step gives to the next), and
`proposals_for` and `hidden_rows_for` (how much of it travels with a request). The engine asks them through the types
that have those widths (common/engine/forward/draft_inputs.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from common.checkpoint import model_files
from common.checkpoint.aux_layers import AuxLayers
from common.checkpoint.model_config import ModelConfig
from common.checkpoint.mtp_format import MtpFormat
from common.errors import ModelError


@dataclass(frozen=True, slots=True)
class DraftConfig:
    """One draft model for one target."""

    algorithm: str  # name of its record
    model: ModelConfig  # shapes of the draft's own layers
    target_hidden: int  # 0: the draft reads nothing of the target
    aux: AuxLayers  # streams of the target that the draft reads
    draft_vocab: int | None  # tokens that the draft can propose; None: all, by the target's head
    norm_before_residual: bool  # what goes past attention is the normed stream
    mtp: MtpFormat | None = None  # of a multi-layer draft: a module per step, model.num_layers of them
    fc_norms: tuple[str, ...] = ()  # norms of what the target gives, one for each equal part of it
    norm_output: bool = False  # a draft step gives its normed output to the next

    @property
    def modules(self) -> int:
        """The number of modules of a multi-layer draft, one per step; 0 where one layer stack runs at every step."""
        return 0 if self.mtp is None else self.model.num_layers

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """Boundaries of the target whose streams the draft reads; (): the normed output."""
        return self.aux.boundaries


def with_steps(draft: DraftConfig, steps: int) -> DraftConfig:
    """The draft as it runs for so many steps: of a multi-layer one the first modules. `ModelError` if it has fewer."""
    if draft.mtp is None:
        return draft
    if steps > draft.modules:
        raise ModelError(
            f"this draft has {draft.modules} modules, one for each step: set speculation.steps to at most "
            f"{draft.modules}, not {steps}"
        )
    model = replace(
        draft.model,
        num_layers=steps,
        sliding_windows=draft.model.sliding_windows[:steps],
        layer_kinds=draft.model.layer_kinds[:steps],
    )
    return replace(draft, model=model)


def target_width(draft: DraftConfig) -> int:
    """Hidden values per token that the draft reads of the target; 0: none."""
    return draft.target_hidden * max(1, len(draft.aux_layers))


def hidden_size_for(draft: DraftConfig) -> int:
    """Hidden values that a draft step gives to the next one; 0: none."""
    return draft.model.hidden_size if draft.target_hidden else 0


def hidden_rows_for(draft: DraftConfig) -> int:
    """Hidden states that travel with a request: the newest, or one for each module but the first (see mtp.py)."""
    if not draft.target_hidden:
        return 0
    return draft.modules - 1 if draft.modules else 1


def proposals_for(draft: DraftConfig, topk: int) -> int:
    """Drafts that travel with a request: those of the first step, or of all steps where each has its module."""
    return topk * max(draft.modules, 1) if draft.target_hidden else 0


def lookahead_for(draft: DraftConfig) -> int:
    """How many tokens behind a position its draft KV depends on."""
    return max(draft.modules, 1) if draft.target_hidden else 0


def draft_fingerprint(path: str | Path, draft: DraftConfig, steps: int, topk: int) -> str:
    """What two nodes compare beside the target's fingerprint: weights, widths and the shape of drafting."""
    facts = (draft.algorithm, steps, topk, draft.aux_layers, target_width(draft), hidden_size_for(draft))
    # where the layers were found out from says nothing of what is computed
    return model_files.fingerprint(Path(path), repr((facts, replace(draft, aux=AuxLayers(draft.aux_layers)))))


def check_same(file: Path, what: str, ours: int, theirs: int) -> None:
    """Raises ModelError where the draft's value of `what` is not the target's."""
    if ours != theirs:
        raise ModelError(
            f"{file}: {what} is {ours}, the target has {theirs}: this draft is for another model"
        )
