"""The drafts as modules that process all positions of known text at once, for training and for the oracle.

Row t of step k has read the text up to x[t+1+k] and predicts x[t+2+k] (STANDALONE: see its class). `reference` contains
the same drafts one token at a time, written independently.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from deploy.tiny_models.drafts.features import Features, Shared
from deploy.tiny_models.drafts.layers import Attention, DecoderLayer, KeyValue, Mlp, RMSNorm
from deploy.tiny_models.drafts.shapes import Dims


class Prediction(NamedTuple):
    """Row t of `logits` predicts x[t + ahead]."""

    logits: Tensor  # [batch, tokens, draft vocabulary]
    ahead: int


class Head(nn.Module, ABC):
    """A draft over known text."""

    @abstractmethod
    def unroll(self, shared: Shared, features: Features, ids: Tensor, steps: int) -> list[Prediction]:
        """Run all steps for ids `[batch, tokens]`; step k reads true tokens where a draft loop reads its drafts."""


def tokens_ahead(features: Features, ahead: int) -> Tensor:
    """Return the embeddings of x[t + ahead]. Rows whose token is past the end get zeros and are meaningless."""
    return F.pad(features.embeds[:, ahead:], (0, 0, 0, ahead))


class Eagle3Layer(nn.Module):
    """The only layer of EAGLE-3: attention reads the next token's embedding concatenated with the hidden state."""

    def __init__(self, dims: Dims) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(dims.hidden, dims.eps)
        self.hidden_norm = RMSNorm(dims.hidden, dims.eps)
        self.self_attn = Attention(dims, 2 * dims.hidden)
        self.post_attention_layernorm = RMSNorm(dims.hidden, dims.eps)
        self.mlp = Mlp(dims)

    def forward(self, embedding: Tensor, hidden: Tensor, seen: list[KeyValue]) -> Tensor:
        both = torch.cat((self.input_layernorm(embedding), self.hidden_norm(hidden)), dim=-1)
        hidden = hidden + self.self_attn(both, seen)
        out: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


class Eagle3Head(Head):
    """EAGLE-3: fuses three residual streams of the target through `fc`; own head over a reduced vocabulary."""

    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        dims = Dims.of(config)
        self._aux = tuple(config["eagle_config"]["eagle_aux_hidden_state_layer_ids"])
        self.fc = nn.Linear(len(self._aux) * config["target_hidden_size"], dims.hidden, bias=False)
        self.midlayer = Eagle3Layer(dims)
        self.norm = RMSNorm(dims.hidden, dims.eps)
        self.lm_head = nn.Linear(dims.hidden, config["draft_vocab_size"], bias=False)
        self.register_buffer("d2t", torch.zeros(config["draft_vocab_size"], dtype=torch.int64))
        self.register_buffer("t2d", torch.zeros(config["vocab_size"], dtype=torch.bool))

    def choose_vocabulary(self, shared: Shared, token_ids: Tensor) -> None:
        """Draft these ids of the target, in ascending order; the head is initialized from the target's rows."""
        with torch.no_grad():
            self.d2t.copy_(token_ids - torch.arange(len(token_ids), device=token_ids.device))
            self.t2d.zero_()[token_ids] = True
            self.lm_head.weight.copy_(shared.head[token_ids])

    def unroll(self, shared: Shared, features: Features, ids: Tensor, steps: int) -> list[Prediction]:
        hidden = self.fc(torch.cat([features.entering[layer] for layer in self._aux], dim=-1))
        seen: list[KeyValue] = []
        predictions = []
        for step in range(steps):
            hidden = self.midlayer(tokens_ahead(features, 1 + step), hidden, seen)
            predictions.append(Prediction(self.lm_head(self.norm(hidden)), 2 + step))
        return predictions


class EagleHead(Head):
    """EAGLE-1/2: predicts the target's normed hidden state, from which the target's own head computes logits."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        dims = Dims.of(config)
        self.fc = nn.Linear(2 * dims.hidden, dims.hidden, bias=False)
        self.layers = nn.ModuleList([DecoderLayer(dims, input_norm=False)])

    def unroll(self, shared: Shared, features: Features, ids: Tensor, steps: int) -> list[Prediction]:
        hidden = features.last
        seen: list[KeyValue] = []
        predictions = []
        for step in range(steps):
            hidden = self.fc(torch.cat((tokens_ahead(features, 1 + step), hidden), dim=-1))
            hidden = self.layers[0](hidden, seen)
            predictions.append(Prediction(F.linear(hidden, shared.head), 2 + step))
        return predictions


class MtpModule(DecoderLayer):
    """One multi-token prediction module as DeepSeek publishes it, with a dense layer."""

    def __init__(self, dims: Dims) -> None:
        super().__init__(dims, input_norm=True)
        self.enorm = RMSNorm(dims.hidden, dims.eps)
        self.hnorm = RMSNorm(dims.hidden, dims.eps)
        self.eh_proj = nn.Linear(2 * dims.hidden, dims.hidden, bias=False)
        self.shared_head = nn.ModuleDict({"norm": RMSNorm(dims.hidden, dims.eps)})

    def run(self, embedding: Tensor, hidden: Tensor) -> Tensor:
        """Run the module. Every module has its own cache over all positions, so this is plain causal attention."""
        both = torch.cat((self.enorm(embedding), self.hnorm(hidden)), dim=-1)
        normed: Tensor = self.shared_head["norm"](self(self.eh_proj(both), []))
        return normed


class MtpHead(Head):
    """A chain of modules, one per step; each reads the normed output of the previous one."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        dims = Dims.of(config)
        self.layers = nn.ModuleList(MtpModule(dims) for _ in range(config["num_nextn_predict_layers"]))

    def start_norms(self, norm: Tensor) -> None:
        """Initialize the norm before each shared head with the target's final norm, with which the head was trained."""
        with torch.no_grad():
            for name, weight in self.named_parameters():
                if name.endswith("shared_head.norm.weight"):
                    weight.copy_(norm)

    def unroll(self, shared: Shared, features: Features, ids: Tensor, steps: int) -> list[Prediction]:
        hidden = features.last
        predictions = []
        for step, module in enumerate(list(self.layers)[:steps]):
            assert isinstance(module, MtpModule)
            hidden = module.run(tokens_ahead(features, 1 + step), hidden)
            predictions.append(Prediction(F.linear(hidden, shared.head), 2 + step))
        return predictions


class StandaloneHead(Head):
    """A small language model. One pass gives every step: its predictions after known text."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        super().__init__()
        self.model = model

    def unroll(self, shared: Shared, features: Features, ids: Tensor, steps: int) -> list[Prediction]:
        out: Any = self.model(input_ids=ids, use_cache=False)
        return [Prediction(out.logits, 1)]
