"""The draft model of a node at start-up, beside the target that it drafts for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from common.draft_config import DraftConfig, draft_fingerprint, proposals_for
from common.engine.attention.paged import PagedAttention
from common.engine.draft_runner import DraftRunner, load_draft
from common.engine.forward.draft_inputs import EagleDraftInput
from common.engine.kv_cache.pool import KvPool
from common.engine.kv_cache.relay_state import DraftShape
from common.engine.layers.placement import Placement
from common.engine.model_runner import ModelRunner, load_model
from common.engine.models.eagle import Eagle3Head, EagleHead
from common.engine.models.llama import LlamaForCausalLM
from common.engine.models.mtp import MtpModules
from common.engine.mtp_runner import MultiLayerRunner, load_mtp
from common.errors import TakesNoEmbeddings

TAKES_EMBEDS = ("eagle", "eagle3")  # algorithms whose heads read embeddings, not ids
AnyDraftRunner = DraftRunner | MultiLayerRunner | ModelRunner


@dataclass(frozen=True, slots=True)
class ServingDraft:
    """One loaded draft."""

    head: Eagle3Head | EagleHead | MtpModules | LlamaForCausalLM
    config: DraftConfig
    fingerprint: str
    shape: DraftShape
    topk: int

    def describe(self) -> dict[str, str]:
        """For the log and /server_info."""
        aux = {f"draft_{name}": value for name, value in self.config.aux.describe().items()}
        return {"draft": self.config.algorithm, **aux}

    def runner(self, pool: KvPool) -> AnyDraftRunner:
        """A head or modules that continue the target's hidden states, or a model of its own."""
        attention = PagedAttention(pool, self.config.model.sliding_windows)
        if isinstance(self.head, LlamaForCausalLM):
            return ModelRunner(self.head, pool, attention)
        if isinstance(self.head, MtpModules):
            return MultiLayerRunner(self.head.heads, attention)
        return DraftRunner(self.head, attention, self.topk)


def load_serving_draft(
    path: Path,
    config: DraftConfig,
    steps: int,
    topk: int,
    target: LlamaForCausalLM,
    placement: Placement,
) -> ServingDraft:
    """Load, share the target's embedding and head, and hold real widths against those of the config."""
    _check_takes_embeds(path, config, target)
    fingerprint = draft_fingerprint(path, config, steps, topk)
    if config.algorithm == "standalone":
        dtype = str(placement.dtype).removeprefix("torch.")
        model, _ = load_model(path, dtype, placement.device)
        return ServingDraft(model, config, fingerprint, draft_shape(config, topk, placement), topk)
    load = load_mtp if config.algorithm == "mtp" else load_draft
    head = load(path, config, target, placement)
    return ServingDraft(head, config, fingerprint, draft_shape(config, topk, placement), topk)


def draft_shape(config: DraftConfig, topk: int, placement: Placement) -> DraftShape:
    """What travels with a request, by the width functions; nothing for a draft without hidden states."""
    if not config.target_hidden:
        return DraftShape()
    carried = EagleDraftInput.carried_size_for(config), EagleDraftInput.dtype_for(placement)
    return DraftShape(proposals_for(config, topk), *carried, config.model.vocab_size)


def _check_takes_embeds(path: Path, config: DraftConfig, target: LlamaForCausalLM) -> None:
    """Rows A7 and C4: behind a target that reads images, a draft has to read their embeddings too."""
    if target.config.vision is not None and config.algorithm not in TAKES_EMBEDS:
        raise TakesNoEmbeddings(
            f"{path}: a {config.algorithm} draft reads token ids alone and cannot take the embeddings of the images "
            f"that the model reads; set speculation.algorithm to none, ngram, {' or '.join(TAKES_EMBEDS)}"
        )
