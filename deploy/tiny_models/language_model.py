"""The classes of transformers that the trainers take: a body `model`, and a head `lm_head`."""

from __future__ import annotations

from transformers import LlamaForCausalLM, Qwen3_5MoeForCausalLM, Qwen3ForCausalLM, Qwen3MoeForCausalLM

LanguageModel = LlamaForCausalLM | Qwen3ForCausalLM | Qwen3MoeForCausalLM | Qwen3_5MoeForCausalLM
