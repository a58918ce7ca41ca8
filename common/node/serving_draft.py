"""Loads the draft model of a node at start-up, for the target that it drafts for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from common.checkpoint.draft_config import DraftConfig, draft_fingerprint, proposals_for
from common.engine.attention.backend import MakeAttention
from common.engine.forward.draft_inputs import DraftInput
from common.engine.layers.placement import Placement
from common.engine.models.causal_lm import CausalLM
from common.engine.state.draft_row import DraftShape
from common.engine.state.pool import KvPool
from common.engine.state.relay_state import hidden_dtype
from common.errors import TakesNoEmbeddings
from common.named import named
from common.node.loaded_draft import DraftParts, LoadedDraft
from common.speculation.algorithm import DraftDirectory
from common.speculation.table import algorithm, algorithms


@dataclass(frozen=True, slots=True)
class ServingDraft:
    """One loaded draft."""

    loaded: LoadedDraft
    config: DraftConfig
    fingerprint: str
    shape: DraftShape

    def describe(self) -> dict[str, str]:
        """Return the fields for the log and /server_info."""
        aux = {f"draft_{name}": value for name, value in self.config.aux.describe().items()}
        return {"draft": self.config.algorithm, **aux}

    def runner(self, pool: KvPool, attention: MakeAttention) -> object:
        """Return the runner of the draft over `pool`, its planes of the node's pages."""
        model = self.config.model
        return self.loaded.runner(pool, attention(pool, model.sliding_windows, model.attention_scale))


def load_serving_draft(
    path: Path,
    config: DraftConfig,
    steps: int,
    topk: int,
    target: CausalLM,
    max_tokens: int | None = None,
) -> ServingDraft:
    """Load the draft, share the target's embedding and head with it, and compare real widths with its config.

    Args:
        max_tokens: as in `DraftParts`.
    """
    config = replace(config, model=config.model.for_length(max_tokens))
    directory = algorithm(config.algorithm).directory
    assert directory is not None
    _check_takes_embeds(path, config, directory, target)
    placement = target.placement
    loaded: LoadedDraft = named(directory.model)(
        DraftParts(path, config, target, placement, topk, max_tokens)
    )
    fingerprint = draft_fingerprint(path, config, steps, topk)
    return ServingDraft(loaded, config, fingerprint, draft_shape(config, topk, placement))


def draft_shape(config: DraftConfig, topk: int, placement: Placement) -> DraftShape:
    """Return the per-request state by the width functions; nothing for a draft without hidden states."""
    if not config.target_hidden:
        return DraftShape()
    width, dtype = DraftInput.carried_size_for(config), DraftInput.dtype_for(placement)
    return DraftShape(proposals_for(config, topk), width, hidden_dtype(dtype), config.model.vocab_size)


def _check_takes_embeds(path: Path, config: DraftConfig, directory: DraftDirectory, target: CausalLM) -> None:
    """Raise TakesNoEmbeddings if the target reads images and the draft cannot read their embeddings."""
    if target.config.vision is None or directory.takes_embeds or config.repeats:
        return
    able = [each.name for each in algorithms() if each.directory is None or each.directory.takes_embeds]
    raise TakesNoEmbeddings(
        f"{path}: a {config.algorithm} draft reads only token ids and cannot take the embeddings of the images "
        f"that the model reads; set speculation.algorithm to {', '.join(able[:-1])} or {able[-1]}"
    )
