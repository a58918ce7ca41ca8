"""Runs the modules of a multi-layer draft over one KV pool, with planes per module, and loads their checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from torch import Tensor

from common.checkpoint.draft_config import DraftConfig
from common.engine.attention.backend import AttentionBackend
from common.engine.forward.batch import ForwardBatch
from common.engine.forward.draft_inputs import EagleDraftInput
from common.engine.forward.draft_runner import DraftRunner
from common.engine.layers.placement import Placement
from common.engine.models.causal_lm import CausalLM
from common.engine.models.eagle import DraftOutput, SplitHead
from common.engine.models.model_size import check_draft_size
from common.engine.models.mtp import EMBEDDING, HEAD, MtpModules, build_mtp
from common.engine.weights import load_weights


class Module(Protocol):
    """The interface of one module for draft steps: a DraftRunner or a DraftPrefill."""

    def forward(self, batch: ForwardBatch, hidden: Tensor) -> DraftOutput:
        """Run rows with the hidden states that the module reads [T, H]; the output includes the next module's input."""
        ...

    def propose(self, rows: Tensor, output: DraftOutput) -> EagleDraftInput:
        """Return the likeliest next token after rows [R] of a forward."""
        ...


class MultiLayerRunner:
    """One runner per module, which is one per step. `attention` has the planes of module k as its layer k."""

    def __init__(self, heads: Sequence[SplitHead], attention: AttentionBackend) -> None:
        self.modules = tuple(DraftRunner(head, attention, topk=1) for head in heads)


def load_mtp(path: Path, draft: DraftConfig, target: CausalLM, placement: Placement) -> MtpModules:
    """Load the modules that are used; the checkpoint may contain more, or the target too. Raises ModelError."""
    assert draft.mtp is not None
    check_draft_size(path, draft)
    model = build_mtp(draft, target, placement)
    prefixes = tuple(f"{draft.mtp.prefix(index)}." for index in range(draft.model.num_layers))
    copies = tuple(f"{prefix}{part}.weight" for prefix in prefixes for part in (EMBEDDING, HEAD))
    load_weights(path, model.pieces(), ignore=copies, within=prefixes)
    return model.eval()
