"""Requests of SGLang's /generate, and what they mean as a completions request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from common.errors import InvalidRequest
from router.requests.constraint_fields import StructuredOutputs
from router.requests.field_rules import refuse_fields
from router.requests.json_body import decode_json
from router.requests.openai_schema import MAX_PROMPTS, CacheSalt, CompletionRequest, RequestId, Text
from router.requests.sampling_fields import SamplingFields

DEFAULT_TOKENS = 128  # as in SGLang, or what the context leaves
MOST_TOKENS = 1 << 30  # more than any context leaves
_ONE = "one prompt that is not in a list"


class GenerateSampling(SamplingFields, frozen=True, kw_only=True):
    """SGLang's `sampling_params`."""

    # null means what the context leaves, and no value the default
    max_new_tokens: int | UnsetType | None = UNSET
    min_new_tokens: int | None = None
    no_stop_trim: bool | None = None
    sampling_seed: int | None = None
    n: int | None = None
    json_schema: Any = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: Any = None
    # refused unless they have no effect: see _SAMPLING_NEUTRAL
    stop_regex: Any = None
    spaces_between_special_tokens: Any = None
    stream_interval: Any = None


# Fields of the completions request that `sampling_params` has: their names here.
_SAMPLING = {
    **{
        name: name
        for name in CompletionRequest.__struct_fields__
        if name in GenerateSampling.__struct_fields__
    },
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "seed": "sampling_seed",
    "include_stop_str_in_output": "no_stop_trim",
}


def sampling_place(index: int | None) -> str:
    """Return where the client has sent the sampling fields of all prompts, or of the one with this index."""
    return "sampling_params" if index is None else f"sampling_params[{index}]"


def sampling_names(index: int | None) -> dict[str, str]:
    """Return the names that refusals give to sampling fields; `names_of` has those of all fields."""
    where = sampling_place(index)
    return {"structured_outputs": where, **{name: f"{where}.{own}" for name, own in _SAMPLING.items()}}


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of POST /generate: either `text` or `input_ids`, one prompt or a list of prompts."""

    text: Text | list[Text] | None = None
    input_ids: list[int | list[int]] | None = None
    sampling_params: GenerateSampling | list[GenerateSampling] | None = None  # of all prompts, or of each
    stream: bool | None = None
    return_logprob: bool | None = None
    logprob_start_len: int | None = None
    top_logprobs_num: int | None = None
    token_ids_logprob: list[int] | None = None
    return_text_in_logprobs: bool | None = None
    # of the request, or of each prompt
    rid: RequestId | Annotated[list[RequestId], Meta(max_length=MAX_PROMPTS)] | None = None
    priority: int | None = None  # higher first
    extra_key: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    cache_salt: CacheSalt | None = None  # another name of extra_key
    model: str | None = None
    return_hidden_states: bool | None = None
    require_reasoning: bool | None = None
    max_thinking_tokens: int | None = None
    # refused unless they have no effect: see _NEUTRAL
    image_data: Any = None
    video_data: Any = None
    audio_data: Any = None
    input_embeds: Any = None
    modalities: Any = None
    return_routed_experts: Any = None
    lora_path: Any = None
    session_id: Any = None
    session_params: Any = None
    custom_logit_processor: Any = None
    bootstrap_host: Any = None
    bootstrap_port: Any = None
    bootstrap_room: Any = None
    data_parallel_rank: Any = None


_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "image_data": (),
    "video_data": (),
    "audio_data": (),
    "input_embeds": (),
    "modalities": (["text"],),
    "return_routed_experts": (False,),
    "lora_path": (),
    "session_id": (),
    "session_params": ({},),
    "custom_logit_processor": (),
    "bootstrap_host": (),
    "bootstrap_port": (),
    "bootstrap_room": (),
    "data_parallel_rank": (),
}
_SAMPLING_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "stop_regex": ([],),
    # Fast tokenizers, the only ones here, write no spaces either way.
    "spaces_between_special_tokens": (True, False),
    "stream_interval": (1,),
}


class PromptsOfGenerate(CompletionRequest, frozen=True, kw_only=True):
    """A completions request with the default length of /generate."""

    native: ClassVar[bool] = True

    fills_context: bool = False  # the client sent null as the length

    @property
    def default_tokens(self) -> int:
        return MOST_TOKENS if self.fills_context else DEFAULT_TOKENS


class GenerateTask(msgspec.Struct, frozen=True, kw_only=True):
    """A request after its translation."""

    completion: PromptsOfGenerate
    # What each prompt is answered with, if sampling_params is a list: `completion` without its prompts.
    own: tuple[PromptsOfGenerate, ...] = ()
    listed: bool  # the answer is a list, because the request has several prompts or choices
    rid: str | None
    rids: tuple[str, ...] = ()  # of each prompt, if they have ids of their own
    logprobs: bool
    with_text: bool  # log-probabilities name the text of each token
    # The first position of the prompt that is listed with its log-probability; None: none.
    start: int | None = None


_NAMES = {
    "prompt": "text",
    "logprobs": "top_logprobs_num",
    "logprob_token_ids": "token_ids_logprob",
    "cache_salt": "extra_key",
    **sampling_names(None),
}


def names_of(task: GenerateTask) -> dict[str, str]:
    """Return the names in refusals: field of the completions request -> field of the client's request."""
    prompt = task.completion.prompt
    listed_ids = not isinstance(prompt, str) and not isinstance(prompt[0], str)
    return {**_NAMES, "prompt": "input_ids"} if listed_ids else _NAMES


_decoder = msgspec.json.Decoder(GenerateRequest)


def read_generate(raw: bytes | bytearray) -> GenerateTask:
    """Parse and translate a body. Raises InvalidRequest, which names the field."""
    request = decode_json(raw, _decoder)
    given = request.sampling_params
    own = isinstance(given, list)
    samplings = given if isinstance(given, list) else [given or GenerateSampling()]
    refuse_fields(request, _NEUTRAL)
    for index, sampling in enumerate(samplings):
        refuse_fields(sampling, _SAMPLING_NEUTRAL, f"{sampling_place(index if own else None)}.")
    prompt, listed = _prompt(request)
    if own:
        _check_list(samplings, len(prompt) if listed else None)
    rids = tuple(request.rid) if isinstance(request.rid, list) else None
    if rids is not None and (not listed or len(rids) != len(prompt)):
        asked = f"{len(prompt)} prompts" if listed else _ONE
        raise InvalidRequest(
            f"rid lists {len(rids)} ids for {asked}; send one for each, or a string for the request",
            param="rid",
        )
    if request.cache_salt and request.extra_key:
        raise InvalidRequest(
            "cache_salt and extra_key mean the same here: send one of them", param="cache_salt"
        )
    if not request.return_logprob and request.top_logprobs_num:
        raise InvalidRequest("top_logprobs_num needs return_logprob: true", param="top_logprobs_num")
    if not request.return_logprob and request.token_ids_logprob:
        raise InvalidRequest("token_ids_logprob needs return_logprob: true", param="token_ids_logprob")
    start = _first_scored(request)
    return GenerateTask(
        completion=_completion(request, samplings[0], prompt, start),
        own=tuple(_completion(request, each, "", start) for each in samplings) if own else (),
        listed=listed or (samplings[0].n or 1) > 1,
        rid=request.rid if isinstance(request.rid, str) else None,
        rids=rids or (),
        logprobs=bool(request.return_logprob),
        with_text=bool(request.return_text_in_logprobs),
        start=start,
    )


def _completion(
    request: GenerateRequest, sampling: GenerateSampling, prompt: str | list[Any], start: int | None
) -> PromptsOfGenerate:
    return PromptsOfGenerate(
        model=request.model,
        return_hidden_states=request.return_hidden_states,
        require_reasoning=request.require_reasoning,
        max_thinking_tokens=request.max_thinking_tokens,
        prompt=prompt,
        **{name: _given(getattr(sampling, own)) for name, own in _SAMPLING.items()},
        fills_context=sampling.max_new_tokens is None,
        structured_outputs=None
        if sampling.structural_tag is None
        else StructuredOutputs(structural_tag=sampling.structural_tag),
        stream=request.stream,
        logprobs=(request.top_logprobs_num or 0) if request.return_logprob else None,
        logprob_token_ids=request.token_ids_logprob,
        # The prompt comes back with its log-probabilities; then no answer is needed.
        echo=start is not None or (sampling.max_new_tokens == 0 and bool(request.return_hidden_states)),
        cache_salt=request.cache_salt or request.extra_key,
        # completions take lower priorities first
        priority=None if request.priority is None else -request.priority,
    )


def _given(value: Any) -> Any:
    """Return a field's value; None if the client did not send it."""
    return None if value is UNSET else value


def _check_list(samplings: Sequence[GenerateSampling], prompts: int | None) -> None:
    """Require one item for each prompt, all with the same number of answers. `prompts`: None for one, not in a list."""
    if len(samplings) != prompts:
        listed = _ONE if prompts is None else f"{prompts} prompts"
        raise InvalidRequest(
            f"sampling_params lists {len(samplings)} objects for {listed}; send one for each, or an object for all",
            param="sampling_params",
        )
    counts = [1 if each.n is None else each.n for each in samplings]
    for index, count in enumerate(counts):
        if count != counts[0]:
            raise InvalidRequest(
                "n must be the same in all items of sampling_params", param=f"{sampling_place(index)}.n"
            )


def _first_scored(request: GenerateRequest) -> int | None:
    """Return the first position of the prompt whose log-probability is wanted; None, as for -1, if none is."""
    start = request.logprob_start_len
    if start is None or start == -1:
        return None
    if start < -1:
        raise InvalidRequest("logprob_start_len must be at least -1", param="logprob_start_len")
    if not request.return_logprob:
        raise InvalidRequest("logprob_start_len needs return_logprob: true", param="logprob_start_len")
    return start


def _prompt(request: GenerateRequest) -> tuple[str | list[Any], bool]:
    """Return the prompt of a completions request and whether it is a list of prompts."""
    if (request.text is None) == (request.input_ids is None):
        raise InvalidRequest("send either text or input_ids", param="text")
    prompt: str | list[Any] = request.text if request.text is not None else request.input_ids or []
    if not prompt and isinstance(prompt, list):
        raise InvalidRequest(
            "send at least one prompt", param="input_ids" if request.text is None else "text"
        )
    return prompt, isinstance(prompt, list) and not isinstance(prompt[0], int)
