"""A draft model with its KV pool and attention backend: hidden states and tokens in, proposals out."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from common.checkpoint.draft_config import DraftConfig
from common.checkpoint.model_files import read_tensors
from common.engine.attention.backend import AttentionBackend
from common.engine.forward.batch import ForwardBatch
from common.engine.forward.draft_inputs import DraftExtendInput, DraftInput
from common.engine.forward.file_embedding import take_embedding
from common.engine.forward.own_head import check_head
from common.engine.layers.placement import Placement
from common.engine.models.causal_lm import CausalLM
from common.engine.models.eagle import (
    D2T,
    EMBEDDING,
    FC_BIAS,
    LM_HEAD,
    DraftOutput,
    Eagle3Head,
    EagleHead,
    SplitHead,
    input_norm,
)
from common.engine.models.model_size import check_draft_size
from common.engine.ops.top_tokens import top_tokens
from common.engine.weights import load_weights
from common.errors import ModelError

Head = TypeVar("Head", Eagle3Head, EagleHead)

# An LM head in FP8 also has these, which are not read either.
HEAD_SCALES = ("lm_head.weight_scale", "lm_head.weight_scale_inv", "lm_head.input_scale")
AUX_NORMS = ("aux_norm_low", "aux_norm_mid", "aux_norm_high")  # older names of fc_norm.0, 1, 2


class DraftRunner:
    """Runs one draft model through its attention backend."""

    def __init__(self, head: SplitHead, attention: AttentionBackend, topk: int) -> None:
        self.head = head
        self.attention = attention
        self._topk = topk

    @torch.inference_mode()
    def extend(self, batch: ForwardBatch, target_hidden: Tensor) -> DraftInput:
        """Run rows whose hidden states the target has computed: [T, target_width]."""
        return self.step(batch, self.head.project(target_hidden))

    @torch.inference_mode()
    def step(self, batch: ForwardBatch, hidden: Tensor) -> DraftInput:
        """Run rows with hidden states of a draft step [T, H]; the returned state is that of `batch.logits_rows`."""
        return self.propose(batch.logits_rows, self.forward(batch, hidden))

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, hidden: Tensor) -> DraftOutput:
        """Run the rows without making proposals."""
        self.attention.plan(batch)
        return self.head.forward(batch.input_ids, hidden, batch.positions, self.attention)

    @torch.inference_mode()
    def propose(self, rows: Tensor, output: DraftOutput) -> DraftInput:
        """Return the proposals of rows [R] of a forward's T rows."""
        logits = self.head.compute_logits(output.last.index_select(0, rows))
        probs, ids = top_tokens(logits, self._topk)
        return DraftInput(probs, self.head.target_ids(ids), output.hidden.index_select(0, rows))


def load_eagle(path: Path, draft: DraftConfig, target: CausalLM, placement: Placement) -> EagleHead:
    """Build and fill a head that shares the target's LM head, and its embedding unless the file has another one.

    Some files repeat both. Raises ModelError with what does not fit.
    """
    names = set(read_tensors(path))
    check_draft_size(path, draft)
    _check_shared(path, draft, target, ())
    norms = {input_norm(layer) for layer in range(1, draft.model.num_layers)}
    found = {norm for norm in norms if _published(norm, names) in names}
    head = EagleHead(draft, target, placement, _own_parts(names) | found)
    _fill(path, head, names, (EMBEDDING, LM_HEAD, *HEAD_SCALES))
    if _published(EMBEDDING, names) in names:
        take_embedding(path, head, target, partial(_published, found=names))
    return _checked(head.eval(), draft, placement, path)


def load_eagle3(path: Path, draft: DraftConfig, target: CausalLM, placement: Placement) -> Eagle3Head:
    """Build and fill a head that shares missing parts with the target. Raises ModelError with what does not fit."""
    tensors = read_tensors(path)
    names = set(tensors)
    own = _own_parts(names)
    if LM_HEAD in own:
        check_head(path, _published(LM_HEAD, names), tensors, draft.model.weights)
    check_draft_size(path, draft)
    _check_shared(path, draft, target, own)
    head = Eagle3Head(draft, target, placement, own)
    if draft.reduced_vocab and D2T not in own:
        raise ModelError(f"{path}: draft_vocab_size is set, but the checkpoint has no d2t")
    _fill(path, head, names)
    _check_d2t(path, head.d2t, draft)
    return _checked(head.eval(), draft, placement, path)


def _own_parts(names: Collection[str]) -> set[str]:
    """Return the parts that the head has of its own; it may share the others."""
    return {part for part in (EMBEDDING, LM_HEAD, FC_BIAS, D2T) if _published(part, names) in names}


def _fill(
    path: Path, head: Eagle3Head | EagleHead, names: Collection[str], unused: tuple[str, ...] = ()
) -> None:
    pieces = (piece._replace(name=_published(piece.name, names)) for piece in head.pieces())
    load_weights(path, pieces, ignore=(D2T, "t2d", *unused))


def _published(name: str, found: Collection[str]) -> str:
    """Return the checkpoint's name of a tensor of `pieces`; the same name if the checkpoint has no such tensor."""
    part, _, rest = name.partition(".")
    others = [f"layers.0.{rest}"] if part == "midlayer" else []
    if part == "fc_norm" and int(rest[0]) < len(AUX_NORMS):
        others.append(f"{AUX_NORMS[int(rest[0])]}{rest[1:]}")
    names = [f"{prefix}{each}" for prefix in ("", "model.") for each in (name, *others)]
    return next((each for each in names if each in found), name)


def _check_shared(path: Path, draft: DraftConfig, target: CausalLM, own: Collection[str]) -> None:
    """Check that shared parts have one width and that a target that reads images shares its embedding.

    `own` are the parts that the head has of its own. Raises ModelError.
    """
    ours, theirs = draft.model.hidden_size, target.config.hidden_size
    own_head = draft.reduced_vocab or LM_HEAD in own
    parts = (("embedding", EMBEDDING in own), ("LM head", own_head))
    for part, is_own in parts:
        if ours != theirs and not is_own:
            raise ModelError(
                f"{path}: a hidden_size of {ours} cannot share the target's {part} of {theirs}, and this draft "
                "has none of its own"
            )
    if target.config.vision is not None and EMBEDDING in own:
        raise ModelError(
            f"{path}: it has an embedding of its own, so it cannot read the images that the target embeds; use a "
            "head that shares the target's"
        )


def _check_d2t(path: Path, d2t: Tensor, draft: DraftConfig) -> None:
    """Check the loaded map against the target's vocabulary. Raises ModelError."""
    ids = d2t + torch.arange(len(d2t), device=d2t.device)
    if ids.min() < 0 or ids.max() >= draft.model.vocab_size:
        raise ModelError(f"{path}: d2t does not map {len(d2t)} drafts into the target's vocabulary")


@torch.inference_mode()
def _checked(head: Head, draft: DraftConfig, placement: Placement, path: Path) -> Head:
    """Compare real widths with the width functions, so that an unfit draft does not start."""
    extend, wanted = DraftExtendInput, DraftInput.hidden_size_for(draft)
    given = torch.zeros(
        1, extend.hidden_size_for(draft), dtype=extend.dtype_for(placement), device=placement.device
    )
    width = head.project(given).shape[-1]
    if width != wanted:
        raise ModelError(f"{path}: a draft step reads {width} values, config.json says {wanted}")
    return head
