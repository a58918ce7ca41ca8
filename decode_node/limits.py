"""Limits of a decode node, and the check that a reservation can ever fit them."""

from __future__ import annotations

from dataclasses import dataclass

from common.errors import InvalidRequest
from common.kv_cache.image_keys import with_images
from common.kv_cache.page_space import PageSpace
from common.messages.generation import context_tokens
from common.node.hidden_states import check_states
from decode_node.request import DecodeRequest


@dataclass(frozen=True, slots=True)
class DecodeLimits:
    """Limits from the config, verified at build."""

    max_running: int
    max_transferring: int
    max_queue: int
    max_model_len: int
    vocab_size: int
    reserved_tokens: int
    skip_ahead: int
    drain_timeout: float
    hidden_states: bool = False  # requests may ask for hidden states

    def check(self, request: DecodeRequest, space: PageSpace, extra_slots: int) -> None:
        """Raise InvalidRequest for a request that can never fit. `extra_slots`: KV slots past the last token."""
        if not request.prompt or request.max_output < 1:
            raise InvalidRequest("a reservation needs a prompt and max_tokens for at least one more token")
        if not 0 <= min(request.prompt) <= max(request.prompt) < self.vocab_size:
            raise InvalidRequest(f"token ids must be from 0 to {self.vocab_size - 1}", param="prompt")
        if not request.sampling.fits(self.vocab_size):
            raise InvalidRequest(f"token ids must be from 0 to {self.vocab_size - 1}", param="logit_bias")
        check_states(request.sampling, self.hidden_states)
        with_images(request.prompt, request.images)  # raises for image spans that do not fit
        most = context_tokens(len(request.prompt), request.max_output)
        if most > self.max_model_len:
            raise InvalidRequest(
                f"prompt and max_tokens together need {most} tokens; this cluster serves at most "
                f"{self.max_model_len}; lower max_tokens",
                param="max_tokens",
            )
        # Steps write to the extra slots, and an answer of one token has no step.
        extra_slots = 0 if request.max_output == 1 else extra_slots
        if space.pages_for(most + extra_slots) > space.total_pages:
            raise InvalidRequest(
                f"prompt and max_tokens together need {most} tokens; the decode node's pool holds "
                f"{space.total_pages * space.page_size - extra_slots}; lower max_tokens",
                param="max_tokens",
            )
