"""The MTP module of a Qwen3.5 mixture, used for every draft step, over all positions of known text at once.

Row t of step k has read the text up to x[t+1+k] and predicts x[t+2+k]. Step 0 reads the target's hidden state after its
final norm, every later step the module's own output after `norm`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Qwen3_5MoeTextConfig
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeRMSNorm, Qwen3_5MoeSparseMoeBlock

from deploy.tiny_models.drafts.features import Features, Shared
from deploy.tiny_models.drafts.heads import Head, Prediction, tokens_ahead
from deploy.tiny_models.drafts.layers import KeyValue, angles_of, attend, rotate
from deploy.tiny_models.mixture.shapes import EAGER, Config


class GatedAttention(nn.Module):
    """Attention with normed queries and keys, rotated in part, whose output is gated per value.

    `drafts/layers.Attention` says what a row of a later step attends to.
    """

    def __init__(self, text: Config) -> None:
        super().__init__()
        hidden, self._width = text["hidden_size"], text["head_dim"]
        self._heads, self._kv_heads = text["num_attention_heads"], text["num_key_value_heads"]
        rope = text["rope_parameters"]
        self._rotated = int(self._width * rope["partial_rotary_factor"])
        self._theta = float(rope["rope_theta"])
        self.q_proj = nn.Linear(hidden, 2 * self._heads * self._width, bias=False)
        self.k_proj = nn.Linear(hidden, self._kv_heads * self._width, bias=False)
        self.v_proj = nn.Linear(hidden, self._kv_heads * self._width, bias=False)
        self.o_proj = nn.Linear(self._heads * self._width, hidden, bias=False)
        self.q_norm = Qwen3_5MoeRMSNorm(self._width, text["rms_norm_eps"])
        self.k_norm = Qwen3_5MoeRMSNorm(self._width, text["rms_norm_eps"])

    def forward(self, x: Tensor, seen: list[KeyValue]) -> Tensor:
        """`seen` holds the keys and values of earlier steps of this round; those of this step are appended."""
        batch, tokens, _ = x.shape
        step, groups = len(seen), self._heads // self._kv_heads
        q, gate = self.q_proj(x).view(batch, tokens, self._heads, 2 * self._width).chunk(2, dim=-1)
        k, v = (
            each(x).view(batch, tokens, self._kv_heads, self._width) for each in (self.k_proj, self.v_proj)
        )
        cos, sin = angles_of(self._rotated, self._theta, tokens, step, x.device)
        q, k = (self._rotate(each.transpose(1, 2), cos, sin) for each in (self.q_norm(q), self.k_norm(k)))
        k, v = (each.repeat_interleave(groups, dim=1) for each in (k, v.transpose(1, 2)))
        seen.append((k, v))
        mixed = attend(q, seen) if step else F.scaled_dot_product_attention(q, k, v, is_causal=True)
        gated = mixed.transpose(1, 2) * gate.sigmoid()
        out: Tensor = self.o_proj(gated.flatten(2))
        return out

    def _rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        turned, rest = x[..., : self._rotated], x[..., self._rotated :]
        return torch.cat((rotate(turned, cos, sin), rest), dim=-1)


class MtpLayer(nn.Module):
    """A decoder layer with attention and experts."""

    def __init__(self, text: Config) -> None:
        super().__init__()
        size, eps = text["hidden_size"], text["rms_norm_eps"]
        config = Qwen3_5MoeTextConfig(**text)
        config._experts_implementation = EAGER
        self.input_layernorm = Qwen3_5MoeRMSNorm(size, eps)
        self.self_attn = GatedAttention(text)
        self.post_attention_layernorm = Qwen3_5MoeRMSNorm(size, eps)
        self.mlp = Qwen3_5MoeSparseMoeBlock(config)

    def forward(self, x: Tensor, seen: list[KeyValue]) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), seen)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class MtpHead(Head):
    """Attribute names are the names of published tensors after `mtp.`."""

    def __init__(self, text: Config) -> None:
        super().__init__()
        size, eps = text["hidden_size"], text["rms_norm_eps"]
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.pre_fc_norm_embedding = Qwen3_5MoeRMSNorm(size, eps)
        self.pre_fc_norm_hidden = Qwen3_5MoeRMSNorm(size, eps)
        self.layers = nn.ModuleList([MtpLayer(text)])
        self.norm = Qwen3_5MoeRMSNorm(size, eps)

    def start(self, norm: Tensor) -> None:
        """Initialise the stacks of experts, which transformers leaves empty, and the last norm like the target's."""
        with torch.no_grad():
            self.norm.weight.copy_(norm)
            for parameter in self.parameters():
                if parameter.ndim == 3:
                    parameter.normal_(std=0.02)

    def unroll(self, shared: Shared, features: Features, ids: Tensor, steps: int) -> list[Prediction]:
        hidden = features.last
        seen: list[KeyValue] = []
        predictions = []
        for step in range(steps):
            embedding = tokens_ahead(features, 1 + step)
            both = torch.cat((self.pre_fc_norm_embedding(embedding), self.pre_fc_norm_hidden(hidden)), dim=-1)
            hidden = self.norm(self.layers[0](self.fc(both), seen))
            predictions.append(Prediction(F.linear(hidden, shared.head), 2 + step))
        return predictions
