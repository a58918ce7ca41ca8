"""Limits of a prefill node, and the check that a prompt can ever fit them."""

from __future__ import annotations

from dataclasses import dataclass

from common.errors import InvalidRequest
from common.kv_cache.page_space import PageSpace, as_keys
from common.kv_cache.radix_cache import Keys
from common.messages.prefill_inbox import Prefill
from common.node.hidden_states import check_states


def whole_chunks(chunk_tokens: int, grid: int) -> int:
    """Return the configured size of a chunk rounded to the grid on which prompts are cut: down, but to one step."""
    return max(chunk_tokens // grid, 1) * grid


@dataclass(frozen=True, slots=True)
class PrefillLimits:
    """Limits from the config, verified at build."""

    chunk_tokens: int
    max_batch: int
    max_queue: int
    max_model_len: int
    vocab_size: int
    drain_timeout: float
    grid: int = 1  # prompts are cut only at multiples of it, and `chunk_tokens` is one
    hidden_states: bool = False  # requests may ask for hidden states

    def check(self, message: Prefill, space: PageSpace) -> Keys:
        """Return the prompt's keys, as the batch uses them. Raises InvalidRequest for a prompt that can never fit."""
        tokens = len(message.token_ids)
        if not 1 <= tokens <= self.max_model_len:
            raise InvalidRequest(
                f"the prompt has {tokens} tokens; this cluster serves 1 to {self.max_model_len}",
                param="prompt",
            )
        if space.pages_for(tokens) > space.total_pages:
            raise InvalidRequest(
                f"the prompt's {tokens} tokens do not fit in prefill.pool_tokens", param="prompt"
            )
        keys = as_keys(message.token_ids)
        if keys.min() < 0 or keys.max() >= self.vocab_size:
            raise InvalidRequest(f"token ids must be from 0 to {self.vocab_size - 1}", param="prompt")
        if not message.sampling.fits(self.vocab_size):
            raise InvalidRequest(f"token ids must be from 0 to {self.vocab_size - 1}", param="logit_bias")
        check_states(message.sampling, self.hidden_states)
        return keys
