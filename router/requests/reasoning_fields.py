"""The fields of chats that switch and limit reasoning."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

# A name, or in chats, as in SGLang, a number below 1.
Effort = str | Annotated[float, Meta(ge=0, lt=1)]
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


class ReasoningSwitch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The switches of reasoning in one object, as SGLang takes them."""

    effort: Effort | None = None  # takes precedence over reasoning_effort
    enabled: bool | None = None  # sets enable_thinking and thinking
    max_tokens: int | None = None  # OpenRouter's name for thinking_token_budget
    exclude: bool | None = None  # true, as include_reasoning: false, leaves reasoning out
    # SGLang's other names for effort and enabled
    reasoning_effort: Effort | None = None
    enable: bool | None = None
    # of the Responses API; reasoning is shown whole
    summary: str | None = None
    generate_summary: str | None = None


class ThinkingSwitch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The switch of reasoning as clients of DeepSeek, GLM and Anthropic's models send it."""

    # takes precedence over reasoning.enabled; adaptive, as in SGLang, is enabled
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None  # as thinking_token_budget
    # omitted, as reasoning.exclude, leaves reasoning out
    display: Literal["summarized", "omitted"] | None = None
    clear_thinking: bool | None = None  # GLM's: the variable of that name
