"""What a draft reads of its target: hidden states, logits, and the embedding and head they share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

TARGET = Path(__file__).parent.parent / "tiny-target"


def load_target(directory: Path = TARGET) -> LlamaForCausalLM:
    """The target, frozen: its bf16 weights in fp32."""
    model: LlamaForCausalLM = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32)
    model.requires_grad_(False)
    model.train(False)
    return model


@dataclass(frozen=True, slots=True)
class Features:
    """What the target computed over ids: all that a draft may read of it."""

    embeds: (
        Tensor  # what it read: embeddings of the ids, or of pictures in their place, [batch, tokens, hidden]
    )
    entering: tuple[Tensor, ...]  # per layer, the residual stream entering it, [batch, tokens, hidden]
    last: Tensor  # after the final norm, [batch, tokens, hidden]
    logits: Tensor  # [batch, tokens, vocab]


@torch.no_grad()
def target_features(target: LlamaForCausalLM, ids: Tensor, embeds: Tensor | None = None) -> Features:
    """Run the target over ids `[batch, tokens]`, or over `embeds` in their place."""
    read = target.model.embed_tokens(ids) if embeds is None else embeds
    out: Any = target(inputs_embeds=read, use_cache=False, output_hidden_states=True)
    return Features(read, out.hidden_states[:-1], out.hidden_states[-1], out.logits)


class Shared(NamedTuple):
    """The target's embedding and head, frozen: `[vocab, hidden]` each. No part of a draft's checkpoint."""

    embedding: Tensor
    head: Tensor

    @staticmethod
    def of(target: LlamaForCausalLM) -> Shared:
        """Those of a target."""
        return Shared(target.model.embed_tokens.weight.detach(), target.lm_head.weight.detach())
