"""The inputs that a draft reads from its target: hidden states, logits, and the shared embedding and head."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from deploy.tiny_models.language_model import LanguageModel

TARGET = Path(__file__).parent.parent / "tiny-target"


def load_target() -> LlamaForCausalLM:
    """Load the target, frozen: its bf16 weights in fp32."""
    model: LlamaForCausalLM = LlamaForCausalLM.from_pretrained(TARGET, dtype=torch.float32)
    model.requires_grad_(False)
    model.train(False)
    return model


@dataclass(frozen=True, slots=True)
class Features:
    """The target's results over ids that a draft may read."""

    # [batch, tokens, hidden] its input: embeddings of the ids, or of pictures at their placeholders
    embeds: Tensor
    entering: tuple[Tensor, ...]  # per layer the residual stream that enters it, [batch, tokens, hidden]
    last: Tensor  # [batch, tokens, hidden] after the final norm
    logits: Tensor  # [batch, tokens, vocab]


@torch.no_grad()
def target_features(target: LanguageModel, ids: Tensor, embeds: Tensor | None = None) -> Features:
    """Run the target over ids `[batch, tokens]`, or over `embeds` instead."""
    read = target.model.embed_tokens(ids) if embeds is None else embeds
    out: Any = target(inputs_embeds=read, use_cache=False, output_hidden_states=True)
    return Features(read, out.hidden_states[:-1], out.hidden_states[-1], out.logits)


class Shared(NamedTuple):
    """The target's embedding and head, frozen, `[vocab, hidden]` each. A draft's checkpoint does not contain them."""

    embedding: Tensor
    head: Tensor

    @staticmethod
    def of(target: LanguageModel) -> Shared:
        """Take them from a target."""
        return Shared(target.model.embed_tokens.weight.detach(), target.lm_head.weight.detach())
