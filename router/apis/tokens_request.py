"""Requests of vLLM's /inference/v1/generate, and what they mean as a completions request."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

from router.requests.constraint_fields import StructuredOutputs
from router.requests.field_rules import refuse_fields
from router.requests.json_body import decode_json
from router.requests.openai_schema import (
    MAX_BAD_WORD_LENGTH,
    CacheSalt,
    CompletionRequest,
    RequestId,
    StreamOptions,
)
from router.requests.sampling_fields import SamplingFields


class TokensSampling(SamplingFields, frozen=True, kw_only=True):
    """vLLM's SamplingParams. Its fields have the names of the completions request."""

    n: int | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[Annotated[str, Meta(max_length=MAX_BAD_WORD_LENGTH)]] | None = None
    include_stop_str_in_output: bool | None = None
    structured_outputs: StructuredOutputs | None = None
    # refused unless they have no effect: see _SAMPLING_NEUTRAL
    detokenize: Any = None
    extra_args: Any = None
    flat_logprobs: Any = None
    output_kind: Any = None
    repetition_detection: Any = None
    routed_experts_prompt_start: Any = None
    skip_clone: Any = None
    skip_reading_prefix_cache: Any = None
    spaces_between_special_tokens: Any = None


class TokensRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of POST /inference/v1/generate: the tokens of one prompt."""

    token_ids: Annotated[list[int], Meta(min_length=1)]
    sampling_params: TokensSampling
    model: str | None = None
    request_id: RequestId | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: CacheSalt | None = None
    priority: int | None = None  # lower goes first
    # refused unless they have no effect: see _NEUTRAL
    features: Any = None
    kv_transfer_params: Any = None
    ec_transfer_params: Any = None


_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "features": (),
    "kv_transfer_params": ({},),
    "ec_transfer_params": ({},),
}
_SAMPLING_NEUTRAL: dict[str, tuple[Any, ...]] = {
    # The answer has no text either way.
    "detokenize": (True, False),
    "extra_args": ({},),
    "flat_logprobs": (False,),
    # Whether vLLM's engine gives all tokens so far, new ones, or all at the end: `stream` decides, as in vLLM.
    "output_kind": (0, 1, 2),
    "repetition_detection": (),
    "routed_experts_prompt_start": (0,),
    "skip_clone": (True, False),
    "skip_reading_prefix_cache": (False,),
    "spaces_between_special_tokens": (True, False),
}
# Prompts whose log-probabilities are asked for never read the prefix cache.
_SCORED_NEUTRAL = _SAMPLING_NEUTRAL | {"skip_reading_prefix_cache": (True, False)}
# As in vLLM, the model's generation_config.json does not apply.
_DEFAULTS = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
_SAMPLING = [name for name in TokensSampling.__struct_fields__ if name in CompletionRequest.__struct_fields__]
_SHARED = ("model", "request_id", "stream", "stream_options", "cache_salt", "priority")
# Names in refusals: field of the completions request -> field of the client's request.
TOKENS_NAMES = {"prompt": "token_ids", **{name: f"sampling_params.{name}" for name in _SAMPLING}}


class PromptOfTokens(CompletionRequest, frozen=True, kw_only=True):
    """A completions request whose answer has no text, and whose default length is that of chats."""

    native: ClassVar[bool] = True

    @property
    def default_tokens(self) -> None:
        return None


class TokensTask(msgspec.Struct, frozen=True, kw_only=True):
    """A request after its translation."""

    completion: PromptOfTokens


_decoder = msgspec.json.Decoder(TokensRequest)


def read_tokens(raw: bytes | bytearray) -> TokensTask:
    """Parse and translate a body. Raises InvalidRequest, which names the field."""
    request = decode_json(raw, _decoder)
    sampling = request.sampling_params
    refuse_fields(request, _NEUTRAL)
    neutral = _SAMPLING_NEUTRAL if sampling.prompt_logprobs is None else _SCORED_NEUTRAL
    refuse_fields(sampling, neutral, "sampling_params.")
    given = {name: getattr(sampling, name) for name in _SAMPLING}
    given |= {name: value for name, value in _DEFAULTS.items() if given[name] is None}
    shared = {name: getattr(request, name) for name in _SHARED}
    return TokensTask(completion=PromptOfTokens(prompt=request.token_ids, **shared, **given))
