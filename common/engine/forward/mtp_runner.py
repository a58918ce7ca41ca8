"""Runs several MTP modules over one KV pool, with planes per module, and loads their checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from common.checkpoint.draft_config import DraftConfig
from common.checkpoint.model_files import read_tensors
from common.checkpoint.unlisted_products import with_unlisted
from common.engine.attention.backend import AttentionBackend
from common.engine.forward.batch import ForwardBatch
from common.engine.forward.draft_inputs import DraftInput
from common.engine.forward.draft_runner import DraftRunner
from common.engine.forward.file_embedding import take_embedding
from common.engine.forward.own_head import check_head
from common.engine.layers.placement import Placement
from common.engine.models.causal_lm import CausalLM
from common.engine.models.eagle import DraftOutput, SplitHead
from common.engine.models.model_size import check_draft_size
from common.engine.models.mtp import EMBEDDING, HEAD, MtpModule, MtpModules, build_mtp
from common.engine.weights import load_weights


class Module(Protocol):
    """The interface of one module for draft steps: a DraftRunner or a DraftPrefill."""

    def forward(self, batch: ForwardBatch, hidden: Tensor) -> DraftOutput:
        """Run rows with the hidden states that the module reads [T, H]; the output includes the next module's input."""
        ...

    def propose(self, rows: Tensor, output: DraftOutput) -> DraftInput:
        """Return the likeliest next token after rows [R] of a forward."""
        ...


class MtpRunner:
    """One runner per module, which is one per step. `attention` has the planes of module k as its layer k."""

    def __init__(self, heads: Sequence[SplitHead], attention: AttentionBackend) -> None:
        self.modules = tuple(DraftRunner(head, attention, topk=1) for head in heads)


def load_mtp(path: Path, draft: DraftConfig, target: CausalLM, placement: Placement) -> MtpModules:
    """Load the modules that are used; the checkpoint may contain more, or the target too.

    Modules that are as wide as the target share its embedding and LM head. Most files repeat them; where a file has
    others, the module uses its own. Products that the file of a model in FP8 has as floats stay so. Raises ModelError.
    """
    assert draft.mtp is not None
    check_draft_size(path, draft)
    used = range(draft.model.num_layers)
    prefixes = tuple(f"{draft.mtp.prefix(index)}." for index in used)
    tensors = read_tensors(path)
    for name in (f"{prefix}{HEAD}.weight" for prefix in prefixes):
        if name in tensors:
            check_head(path, name, tensors, draft.model.weights)
    weights = with_unlisted(draft.model.weights, tensors, prefixes)
    model = build_mtp(replace(draft, model=replace(draft.model, weights=weights)), target, placement)
    layers = tuple(f"{draft.mtp.layer_prefix(index)}." for index in used)
    copies = tuple(f"{prefix}{part}.weight" for prefix in prefixes for part in (EMBEDDING, HEAD))
    # Modules that share all but their layers have one prefix, which the layers of unused modules have, too.
    unused = tuple(
        name
        for name in tensors
        if draft.mtp.shared and name.startswith(f"{draft.mtp.module}.layers.") and not name.startswith(layers)
    )
    load_weights(path, model.pieces(), ignore=copies, aside=unused, within=prefixes)
    for prefix, head in zip(prefixes, model.heads, strict=True):
        if head.embed_tokens is target.embed_tokens and f"{prefix}{EMBEDDING}.weight" in tensors:
            take_embedding(path, head, target)
        if head.lm_head is target.lm_head and f"{prefix}{HEAD}.weight" in tensors:
            _take_head(path, head, target)
    return model.eval()


@torch.no_grad()
def _take_head(path: Path, head: MtpModule, target: CausalLM) -> None:
    """Use the LM head of the file unless it is a copy of the target's."""
    own = head.own_head()
    pieces = list(own.pieces())
    load_weights(path, pieces, within=tuple(piece.name for piece in pieces))
    if not torch.equal(own.dense(), target.lm_head.dense()):
        head.lm_head = own
