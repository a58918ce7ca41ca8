"""Draft models as the records of common/speculation name them: loaded, and run over their own KV planes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from common.checkpoint.draft_config import DraftConfig
from common.engine.attention.backend import AttentionBackend
from common.engine.forward.draft_runner import DraftRunner, load_eagle, load_eagle3
from common.engine.forward.model_runner import ModelRunner, load_model
from common.engine.forward.mtp_runner import MtpRunner, load_mtp
from common.engine.layers.placement import Placement
from common.engine.models.causal_lm import CausalLM
from common.engine.models.eagle import SplitHead
from common.engine.models.mtp import MtpModules
from common.engine.models.shared_vocabulary import SharedVocabulary
from common.engine.state.pool import KvPool


@dataclass(frozen=True, slots=True)
class DraftParts:
    """The inputs from which a draft model is loaded."""

    path: Path
    config: DraftConfig
    target: CausalLM  # provides the parts that the draft does not have itself
    placement: Placement
    topk: int
    max_tokens: int | None = None  # of a request; None: as many as the draft model allows


class LoadedDraft(Protocol):
    """A loaded draft model without its KV."""

    def runner(self, pool: KvPool, attention: AttentionBackend) -> object:
        """Return a runner over this pool, which `attention` uses. The node's own tables know the runner's type."""
        ...


@dataclass(frozen=True, slots=True)
class HeadDraft:
    """A head that continues the target's hidden states and runs again for every step."""

    head: SplitHead
    topk: int

    def runner(self, pool: KvPool, attention: AttentionBackend) -> DraftRunner:
        return DraftRunner(self.head, attention, self.topk)


@dataclass(frozen=True, slots=True)
class ModulesDraft:
    """MTP modules: one per step, or one that runs at every step."""

    modules: MtpModules
    repeats: bool

    def runner(self, pool: KvPool, attention: AttentionBackend) -> MtpRunner | DraftRunner:
        if self.repeats:
            return DraftRunner(self.modules.heads[0], attention, topk=1)
        return MtpRunner(self.modules.heads, attention)


@dataclass(frozen=True, slots=True)
class ModelDraft:
    """A separate language model."""

    model: CausalLM

    def runner(self, pool: KvPool, attention: AttentionBackend) -> ModelRunner:
        return ModelRunner(self.model, pool, attention)


def load_eagle_head(parts: DraftParts) -> HeadDraft:
    return HeadDraft(load_eagle(parts.path, parts.config, parts.target, parts.placement), parts.topk)


def load_eagle3_head(parts: DraftParts) -> HeadDraft:
    return HeadDraft(load_eagle3(parts.path, parts.config, parts.target, parts.placement), parts.topk)


def load_modules(parts: DraftParts) -> ModulesDraft:
    modules = load_mtp(parts.path, parts.config, parts.target, parts.placement)
    return ModulesDraft(modules, parts.config.repeats)


def load_language_model(parts: DraftParts) -> ModelDraft:
    dtype = str(parts.placement.dtype).removeprefix("torch.")
    model, config = load_model(
        parts.path,
        dtype,
        parts.placement.device,
        max_tokens=parts.max_tokens,
        ranks=parts.placement.ranks,
        quantization=parts.config.model.weights.quantization,
    )
    vocab = parts.target.config.vocab_size
    return ModelDraft(model if config.vocab_size == vocab else SharedVocabulary(model, vocab))
