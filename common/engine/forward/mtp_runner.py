"""The modules of a multi-layer draft over one KV pool, each with its own planes; and their checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from common.checkpoint.draft_config import DraftConfig
from common.checkpoint.model_files import read_weight_files
from common.engine.attention.backend import AttentionBackend
from common.engine.forward.batch import ForwardBatch
from common.engine.forward.draft_inputs import EagleDraftExtendInput, EagleDraftInput
from common.engine.forward.draft_runner import DraftRunner
from common.engine.layers.activations import Activations
from common.engine.layers.placement import Placement
from common.engine.models.causal_lm import CausalLM
from common.engine.models.eagle import DraftOutput, SplitHead
from common.engine.models.model_size import check_draft_size
from common.engine.models.mtp import MtpModules, build_mtp
from common.engine.weights import load_weights
from common.errors import ModelError


class Module(Protocol):
    """One module as steps run it: a DraftRunner, or a DraftPrefill."""

    def forward(self, batch: ForwardBatch, hidden: Tensor) -> DraftOutput:
        """Rows with the hidden states that the module reads [T, H]; it gives what the next module reads, too."""
        ...

    def propose(self, rows: Tensor, output: DraftOutput) -> EagleDraftInput:
        """The likeliest token behind rows [R] of a forward."""
        ...


class MultiLayerRunner:
    """A runner for the module of each step. `attention` has the planes of module k as its layer k."""

    def __init__(self, heads: Sequence[SplitHead], attention: AttentionBackend) -> None:
        self.modules = tuple(DraftRunner(head, attention, topk=1) for head in heads)


def load_mtp(path: Path, draft: DraftConfig, target: CausalLM, placement: Placement) -> MtpModules:
    """The modules that run, from a checkpoint that may hold more, or the target too. `ModelError`: it does not fit."""
    assert draft.mtp is not None
    names = frozenset(name for file in read_weight_files(path) for name in file.tensors)
    check_draft_size(path, draft)
    model = build_mtp(draft, target, placement, names)
    prefixes = tuple(f"{draft.mtp.prefix(index)}." for index in range(draft.modules))
    load_weights(path, model.pieces(), within=prefixes)
    model = model.eval()
    _probe(model, draft, placement, path)
    return model


@torch.inference_mode()
def _probe(model: MtpModules, draft: DraftConfig, placement: Placement, path: Path) -> None:
    """Real widths against the width functions, module by module: a draft that does not fit must not start."""
    read, carried = EagleDraftExtendInput.hidden_size_for(draft), EagleDraftInput.hidden_size_for(draft)
    hidden = torch.zeros(1, read, dtype=placement.dtype, device=placement.device)
    for step, head in enumerate(model.heads):
        width = head.project(hidden).shape[-1]
        given = head.eh_proj.product(Activations(torch.cat((hidden, hidden), dim=-1))).shape[-1]
        if width != carried or given != carried:
            raise ModelError(
                f"{path}: module {step} reads {width} values and gives {given}, config.json says {carried}"
            )
