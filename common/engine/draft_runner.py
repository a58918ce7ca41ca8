"""A draft model, its KV pool and attention backend: hidden states and tokens in, proposals out."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from common.draft_config import DraftConfig
from common.engine.attention.backend import AttentionBackend
from common.engine.forward.batch import ForwardBatch
from common.engine.forward.draft_inputs import EagleDraftExtendInput, EagleDraftInput
from common.engine.layers.placement import Placement
from common.engine.models.eagle import DraftOutput, Eagle3Head, EagleHead, SplitHead
from common.engine.models.llama import LlamaForCausalLM
from common.engine.ops.top_tokens import top_tokens
from common.engine.weights import load_weights
from common.errors import ModelError
from common.model_files import read_weight_files


class DraftRunner:
    """Runs one draft model. `pool` is the one that `attention` reads and writes."""

    def __init__(self, head: SplitHead, attention: AttentionBackend, topk: int) -> None:
        self.head = head
        self.attention = attention
        self._topk = topk

    @torch.inference_mode()
    def extend(self, batch: ForwardBatch, target_hidden: Tensor) -> EagleDraftInput:
        """Rows whose hidden states the target has computed: [T, target_width]."""
        return self.step(batch, self.head.project(target_hidden))

    @torch.inference_mode()
    def step(self, batch: ForwardBatch, hidden: Tensor) -> EagleDraftInput:
        """Rows with hidden states as a draft step gives them [T, H]; the state is of `batch.logits_rows`."""
        return self.propose(batch.logits_rows, self.forward(batch, hidden))

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, hidden: Tensor) -> DraftOutput:
        """The same rows, of which nothing is proposed yet."""
        self.attention.plan(batch)
        return self.head.forward(batch.input_ids, hidden, batch.positions, self.attention)

    @torch.inference_mode()
    def propose(self, rows: Tensor, output: DraftOutput) -> EagleDraftInput:
        """What the tokens in `rows` [R] of a forward propose, of its T."""
        logits = self.head.compute_logits(output.last.index_select(0, rows))
        probs, ids = top_tokens(logits, self._topk)
        return EagleDraftInput(probs, self.head.target_ids(ids), output.hidden.index_select(0, rows))


def load_draft(
    path: Path, draft: DraftConfig, target: LlamaForCausalLM, placement: Placement
) -> Eagle3Head | EagleHead:
    """Build a draft that shares the target's embedding and fill it. `ModelError` says what does not fit."""
    if draft.model.hidden_size != target.config.hidden_size:
        raise ModelError(
            f"{path}: a hidden_size of {draft.model.hidden_size} cannot share the target's embedding of "
            f"{target.config.hidden_size}"
        )
    names = {name for file in read_weight_files(path) for name in file.tensors}
    if draft.algorithm == "eagle":
        head: Eagle3Head | EagleHead = EagleHead(draft, target, placement)
    else:
        head = Eagle3Head(draft, target, placement)
        if draft.draft_vocab is not None:
            _read_d2t(path, head.d2t, draft)
    layer = "midlayer" if any(name.startswith("midlayer.") for name in names) else "layers.0"
    load_weights(path, head.checkpoint_tensors(layer), ignore=("d2t", "t2d"))
    head = head.eval()
    _probe(head, draft, placement, path)
    return head


def _read_d2t(path: Path, d2t: Tensor, draft: DraftConfig) -> None:
    for file in read_weight_files(path):
        if "d2t" in file.tensors:
            with safe_open(str(file.path), framework="pt") as source:
                offsets = source.get_tensor("d2t")
            ids = offsets.long() + torch.arange(len(offsets))
            if offsets.shape != d2t.shape or ids.min() < 0 or ids.max() >= draft.model.vocab_size:
                raise ModelError(
                    f"{file.path}: d2t does not map {len(d2t)} drafts into the target's vocabulary"
                )
            d2t.copy_(offsets)
            return
    raise ModelError(f"{path}: draft_vocab_size is set, but the checkpoint has no d2t")


@torch.inference_mode()
def _probe(head: Eagle3Head | EagleHead, draft: DraftConfig, placement: Placement, path: Path) -> None:
    """Real widths against the width functions: a draft that does not fit must not start."""
    extend, wanted = EagleDraftExtendInput, EagleDraftInput.hidden_size_for(draft)
    given = torch.zeros(
        1, extend.hidden_size_for(draft), dtype=extend.dtype_for(placement), device=placement.device
    )
    width = head.project(given).shape[-1]
    if width != wanted:
        raise ModelError(f"{path}: a draft step reads {width} values, config.json says {wanted}")
