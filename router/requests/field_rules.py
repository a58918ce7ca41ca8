"""Rules for fields of a request body that the schema in `openai_schema.py` does not declare.

Three kinds of names: fields that never change an answer are ignored silently; fields of OpenAI, vLLM and SGLang that
tandem does not serve are refused by name, because ignoring them would change the answer; unknown names are ignored with
one warning per name, or refused if the cluster file sets `router.strict_fields`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from itertools import chain, islice
from operator import attrgetter
from typing import Any

import msgspec

from common.errors import InvalidRequest
from common.observability.logs import Log

MAX_WARNED = 256  # names that one router process warns about
MAX_REPORTED = 16  # unknown names of one request that are looked at
MAX_NAME = 64  # characters of a name in a warning or an error

# Labels and hints of OpenAI, Anthropic, vLLM and SGLang: billing, storage, logs (which have no texts), caching, the
# length that answers should have, where and how fast they are made, how tokens are gathered into chunks, and what only
# vLLM's `render` routes read or tell.
IGNORED = frozenset(
    {
        "assistant_tokens_mask",
        "betas",
        "cache_control",
        "conversation_id",
        "diagnostics",
        "inference_geo",
        "kv_hints",
        "log_metrics",
        "metadata",
        "no_logs",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "return_assistant_tokens_mask",
        "return_mm_kwargs",
        "return_token_offsets",
        "routing_key",
        "safety_identifier",
        "service_tier",
        "speed",
        "store",
        "stream_interval",
        "token_offsets",
        "user",
        "user_profile_id",
        "verbosity",
        "workspace_id",
    }
)

# Field of OpenAI, vLLM or SGLang -> values that have no effect; null never has one.
NOT_SERVED: dict[str, tuple[Any, ...]] = {
    "access_programs": (),
    "background": (False,),
    "background_options": ({},),
    "beam_width": (1,),
    "bootstrap_host": (),
    "bootstrap_pair_key": (),
    "bootstrap_port": (),
    "bootstrap_room": (),
    "context_management": ([],),
    "custom_labels": ({},),
    "custom_logit_processor": (),
    "data_parallel_rank": (),
    "disagg_prefill_dp_rank": (),
    "ec_transfer_params": (),
    "extra_key": (),
    "image": ({},),
    "image_max_dynamic_patch": (),
    "images_config": ({},),
    "kv_transfer_params": ({},),
    "lora_id": (),
    "max_dynamic_patch": (),
    "max_thinking_tokens": (),
    "media_io_kwargs": ({},),
    "min_dynamic_patch": (),
    "mm_content_hashes": (),
    "mm_hashes": (),
    "mm_processor_kwargs": ({},),
    "moderation": (),
    "multi_item_delimiter_indices": (),
    "ngram_corpus_id": (),
    "no_stop_trim": (False,),
    "positional_embed_overrides": (),
    "repetition_detection": (),
    "require_reasoning": (False,),
    "return_bytes": (False,),
    "return_cached_tokens_details": (False,),
    "return_entropy": (False,),
    "return_flat_raw_output_top_logprobs": (False,),
    "return_flat_raw_top_logprobs": (False,),
    "return_flat_raw_top_logprobs_b64": (False,),
    "return_indexer_topk": (False,),
    "return_input_ids_in_sglext": (False,),
    "return_meta_info": (False,),
    "return_output_ids_in_sglext": (False,),
    "return_prompt_token_ids": (False,),
    "return_routed_experts": (False,),
    "return_sampling_mask": (False,),
    "return_spec_tokens_details": (False,),
    "return_weight_versions": (False,),
    "routed_dp_rank": (),
    "routed_experts_prompt_start": (0,),
    "routed_experts_start_len": (0,),
    "sampling_logprobs_mode": (),
    "session_params": ({},),
    # Fast tokenizers, the only ones here, write no spaces either way.
    "spaces_between_special_tokens": (True, False),
    "stop_regex": ([],),
    "task": (),
    "token_indices_to_pool": (),
    "use_audio_in_video": (False,),
    "video_config": ({},),
    "video_max_dynamic_patch": (),
    "vllm_xargs": ({},),
    "watermark": (),
    "watermarking": (False,),
}

_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


def undeclared(raw: bytes | bytearray, declared: frozenset[str], where: str = "") -> tuple[str, ...]:
    """Return the unknown names in the JSON object `raw`, at most the first MAX_REPORTED of them.

    `declared`: the names of the schema; `where`: the path of the object, which precedes each name. Raises
    InvalidRequest for a field that is known but not served.
    """
    try:
        fields = _fields.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from error
    if fields.keys() <= declared:
        return ()
    unknown: list[str] = []
    for name in fields.keys() - declared - IGNORED:
        if name in NOT_SERVED:
            refuse_unless_neutral(f"{where}{name}", msgspec.json.decode(fields[name]), NOT_SERVED[name])
        elif len(unknown) < MAX_REPORTED:
            unknown.append(f"{where}{name[:MAX_NAME]}")
    return tuple(unknown)


def undeclared_inside(raw: bytes | bytearray, field: str, declared: frozenset[str]) -> tuple[str, ...]:
    """Return the unknown names, as `undeclared` does, in the object or objects that are `field` of the object `raw`.

    There are none in anything else, which the schema refuses.
    """
    inner = bytes(_fields.decode(raw).get(field, b""))
    if not inner.startswith(b"["):
        return undeclared(inner, declared, f"{field}.") if inner.startswith(b"{") else ()
    items = msgspec.json.decode(inner, type=list[msgspec.Raw])
    found = (undeclared(bytes(item), declared, f"{field}[{index}].") for index, item in enumerate(items))
    return tuple(islice(chain.from_iterable(found), MAX_REPORTED))


def refuse_fields(request: msgspec.Struct, neutral: Mapping[str, tuple[Any, ...]], where: str = "") -> None:
    """Raise InvalidRequest for the first field that is not supported, unless its value has no effect.

    Args:
        neutral: field -> values without effect, besides null; `request` may lack fields of it.
        where: the path of `request`, which precedes the name of the field.
    """
    fields = _present(type(request), tuple(neutral))
    if fields.given(request):
        for field in fields.names:
            refuse_unless_neutral(f"{where}{field}", getattr(request, field), neutral[field])


class RareFields:
    """Some fields of a struct, all of which are null in almost every request."""

    def __init__(self, *names: str) -> None:
        """`names`: at least two."""
        self.names = names
        # `values(request) != nulls` is `given` without a Python call, for the path of every request.
        self.values: Callable[[object], tuple[Any, ...]] = attrgetter(*names)
        self.nulls = (None,) * len(names)

    def given(self, request: msgspec.Struct) -> bool:
        """Return whether any of them is not null."""
        return self.values(request) != self.nulls


@lru_cache(maxsize=64)
def _present(kind: type[msgspec.Struct], names: tuple[str, ...]) -> RareFields:
    """Return the fields among `names` that structs of this kind have."""
    return RareFields(*(name for name in names if name in kind.__struct_fields__))


# What serves the purpose of a field.
_INSTEAD = {
    "functions": "send tools",
    "function_call": "send tool_choice",
    "features": "send the images in a chat to /v1/chat/completions",
    "max_thinking_tokens": "send thinking_token_budget",
    "return_input_ids_in_sglext": "send return_token_ids",
    "return_output_ids_in_sglext": "send return_token_ids",
    "kv_transfer_params": "leave it out: the cluster's nodes exchange KV among themselves",
    "ec_transfer_params": "leave it out: prefill nodes encode images themselves",
    "repetition_detection": "send frequency_penalty or repetition_penalty",
}


def refuse_unless_neutral(field: str, value: Any, neutral: tuple[Any, ...]) -> None:
    """Raise InvalidRequest for an unsupported field, unless its value is null or in `neutral`."""
    if value is None or any(_same(value, each) for each in neutral):
        return
    remedy = f"leave it out or send {msgspec.json.encode(neutral[0]).decode()}" if neutral else "leave it out"
    remedy = _INSTEAD.get(field.rpartition(".")[2], remedy)
    raise InvalidRequest(f"{field} is not supported by this version of tandem; {remedy}", param=field)


def _same(value: Any, neutral: Any) -> bool:
    """Return whether two values are equal in JSON: 1 and 1.0 are, 1 and true are not."""
    numbers = (int, float)
    if type(neutral) in numbers:
        return type(value) in numbers and bool(value == neutral)
    return type(value) is type(neutral) and bool(value == neutral)


class UnknownFields:
    """Decides what happens to unknown names: a warning for each new one, or a refusal if `strict`."""

    def __init__(self, log: Log, strict: bool = False) -> None:
        self._log = log
        self._strict = strict
        self._warned: set[str] = set()

    def check(self, names: Iterable[str]) -> None:
        """Raise InvalidRequest for the first name if `strict`."""
        for name in names:
            if self._strict:
                raise InvalidRequest(
                    f"{name} is not a field of this API; leave it out (router.strict_fields is set)",
                    param=name,
                )
            if name not in self._warned and len(self._warned) < MAX_WARNED:
                self._warned.add(name)
                last = len(self._warned) == MAX_WARNED
                self._log.warning("ignored an unknown field", field=name, **({"last": True} if last else {}))
