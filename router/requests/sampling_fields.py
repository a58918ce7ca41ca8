"""The fields of a request that say how tokens are drawn."""

from __future__ import annotations

import msgspec


class CustomParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """SGLang's parameters of logits processors, of which its limit of reasoning tokens is served."""

    thinking_budget: int | None = None


class SamplingFields(msgspec.Struct, frozen=True, kw_only=True):
    """Fields with the same name and meaning in chats, completions, /v1/responses and SGLang's `sampling_params`."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None  # token id -> value added to its logit
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    # The most tokens of reasoning, as in vLLM; -1: no limit. SGLang has it in custom_params.
    thinking_token_budget: int | None = None
    custom_params: CustomParams | None = None
