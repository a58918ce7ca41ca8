"""Converts a request's fields to SamplingParams: ranges, defaults, lengths. Every refusal names its field."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from common.checkpoint.generation_config import DefaultSampling
from common.checkpoint.vision_config import VisionConfig
from common.errors import ContextTooLong, InvalidRequest, ModelNotFound
from common.messages.generation import MAX_PRIORITY, SamplingParams, TokenBias
from common.random_bytes import random_bits
from router.chat.answer_style import PLAIN, AnswerStyle
from router.requests.hidden_states import StateLimit
from router.requests.openai_schema import (
    NO_OPTIONS,
    TOP_LOGPROBS,
    SharedFields,
    TokenIds,
    check_size,
    refuse_unsupported,
)

MAX_NAME_SHOWN = 1000  # characters of a model name in an error message
MAX_BIAS = 100.0  # largest absolute bias of one token
UNSEEDED = -1  # a seed that stands for none, as in vLLM


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The HTTP side's knowledge about the model."""

    name: str
    path: str
    created: int  # Unix seconds
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]  # the primary one first
    defaults: DefaultSampling
    vision: VisionConfig | None = None  # None for a text-only model
    answers: AnswerStyle = PLAIN
    states: StateLimit | None = None  # None: requests may not ask for hidden states

    @property
    def names(self) -> tuple[str, str]:
        """The names under which requests may ask for the model."""
        return self.name, self.path

    @property
    def primary_eos(self) -> int | None:
        """The id that ends an answer without a `stop_reason`."""
        return next(iter(self.eos_token_ids), None)


@dataclass(frozen=True, slots=True)
class _Range:
    """The values that one field may have."""

    field: str
    low: float
    high: float
    low_open: bool = False  # `low` itself is refused

    def checked(self, value: float) -> float:
        """Return the value. Raises InvalidRequest."""
        if not self.low <= value <= self.high or (self.low_open and value == self.low):
            lower = "over" if self.low_open else "at least"
            raise InvalidRequest(
                f"{self.field} must be {lower} {self.low:g} and at most {self.high:g}", param=self.field
            )
        return value


# vLLM and SGLang take any, OpenAI up to 2. The largest makes all tokens that are left equally likely.
_TEMPERATURE = _Range("temperature", 0.0, 1e6)
_TOP_P = _Range("top_p", 0.0, 1.0, low_open=True)
_MIN_P = _Range("min_p", 0.0, 1.0)
_REPETITION = _Range("repetition_penalty", 0.01, 2.0)  # logits are divided by it and must stay finite
_PRESENCE = _Range("presence_penalty", -2.0, 2.0)
_FREQUENCY = _Range("frequency_penalty", -2.0, 2.0)


def check_request(body: SharedFields, model: ServedModel) -> None:
    """Apply the checks that need no prompt."""
    refuse_unsupported(body)
    check_name(body.model, model.names)
    if body.stream_options is not None and not body.stream and body.stream_options != NO_OPTIONS:
        raise InvalidRequest("stream_options needs stream: true", param="stream_options")


def check_name(given: str | None, names: Sequence[str]) -> None:
    """Raise ModelNotFound for the name of another model; `names`: those of the served one."""
    if given and given not in names:
        raise ModelNotFound(
            f"the model {given[:MAX_NAME_SHOWN]!r} is not served here; use {names[0]!r}", param="model"
        )


def check_prompt(
    token_ids: TokenIds, model: ServedModel, prompt_field: str, min_answer_tokens: int = 1
) -> None:
    """Require a non-empty prompt of valid token ids that leaves room for an answer of `min_answer_tokens`.

    The cheap length check comes first.
    """
    if not token_ids:
        raise InvalidRequest(f"{prompt_field} has no tokens; send at least one", param=prompt_field)
    check_length(len(token_ids), model.max_model_len, prompt_field, min_answer_tokens=min_answer_tokens)
    check_tokens_in_vocabulary(token_ids, model.vocab_size, prompt_field)


def check_length(
    tokens: int, max_model_len: int, prompt_field: str, exact: bool = True, min_answer_tokens: int = 1
) -> None:
    """Raise ContextTooLong for a prompt that leaves no room for an answer of `min_answer_tokens`.

    If not `exact`, `tokens` is a lower bound.
    """
    if tokens + min_answer_tokens > max_model_len:
        problem = ", which leaves no room for the completion" if min_answer_tokens else ""
        raise ContextTooLong(
            f"This model's maximum context length is {max_model_len} tokens; the prompt has "
            f"{'' if exact else 'at least '}{tokens}{problem}. Shorten the prompt.",
            param=prompt_field,
        )


def check_tokens_in_vocabulary(token_ids: TokenIds, vocab_size: int, field: str) -> None:
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        raise InvalidRequest(f"token ids must be from 0 to {vocab_size - 1}", param=field)


def sampling_params(
    request: SharedFields,
    prompt_tokens: int,
    model: ServedModel,
    max_tokens: int | None,
    max_field: str,
    logprobs: int | None,
    grammar: str = "",
) -> SamplingParams:
    """Check the fields and fill in defaults.

    `max_field` is the name under which the client sent `max_tokens`; `grammar` comes from `TextService.grammar`.
    """
    defaults = model.defaults
    room = model.max_model_len - prompt_tokens
    _check_max_tokens(max_tokens, room, prompt_tokens, model, max_field)
    stop_tokens = _stop_tokens(request, model, bool(grammar))
    if request.seed is not None and not -(2**63) <= request.seed < 2**63:
        raise InvalidRequest("seed must be a signed number of 64 bits", param="seed")
    if grammar and request.min_tokens:
        raise InvalidRequest(
            "min_tokens cannot be combined with structured output: the grammar decides where the answer may end",
            param="min_tokens",
        )
    most = _default_length(request, room, defaults) if max_tokens is None else max_tokens
    return SamplingParams(
        max_tokens=most,
        temperature=defaults.temperature
        if request.temperature is None
        else _TEMPERATURE.checked(request.temperature),
        top_p=defaults.top_p if request.top_p is None else _TOP_P.checked(request.top_p),
        top_k=_top_k(request.top_k, defaults.top_k, model.vocab_size),
        min_p=defaults.min_p if request.min_p is None else _MIN_P.checked(request.min_p),
        repetition_penalty=(
            defaults.repetition_penalty
            if request.repetition_penalty is None
            else _REPETITION.checked(request.repetition_penalty)
        ),
        presence_penalty=0.0
        if request.presence_penalty is None
        else _PRESENCE.checked(request.presence_penalty),
        frequency_penalty=0.0
        if request.frequency_penalty is None
        else _FREQUENCY.checked(request.frequency_penalty),
        logit_bias=_logit_bias(request, model.vocab_size) if request.logit_bias else (),
        min_tokens=(
            _min_tokens(request.min_tokens, most, len(stop_tokens), model.vocab_size)
            if request.min_tokens
            else 0
        ),
        seed=random_bits(63) if request.seed in (None, UNSEEDED) else request.seed & (2**63 - 1),
        stop_token_ids=tuple(sorted(stop_tokens)),
        logprobs=logprobs,
        logprob_ids=_logprob_ids(request, logprobs, model.vocab_size) if request.logprob_token_ids else (),
        grammar=grammar,
    )


def _default_length(request: SharedFields, room: int, defaults: DefaultSampling) -> int:
    """Return the most tokens of an answer to a request that does not say."""
    if defaults.max_tokens is None:
        return room
    return min(room, max(defaults.max_tokens, request.min_tokens or 0))


def _check_max_tokens(
    max_tokens: int | None, room: int, prompt_tokens: int, model: ServedModel, max_field: str
) -> None:
    if max_tokens is not None and max_tokens < 1:
        raise InvalidRequest(f"{max_field} must be at least 1", param=max_field)
    if max_tokens is not None and max_tokens > room:
        raise ContextTooLong(
            f"This model's maximum context length is {model.max_model_len} tokens; the request has {prompt_tokens} "
            f"in the prompt and {max_tokens} for the completion. Shorten the prompt or lower {max_field}.",
            param=max_field,
        )


def _stop_tokens(request: SharedFields, model: ServedModel, constrained: bool) -> set[int]:
    """Return the tokens that end the answer. A constrained one ends with its grammar, whatever `ignore_eos` says."""
    stop_tokens = set[int]()
    if request.stop_token_ids:
        check_size(request, "stop_token_ids")
        check_tokens_in_vocabulary(request.stop_token_ids, model.vocab_size, "stop_token_ids")
        stop_tokens.update(request.stop_token_ids)
    if request.ignore_eos and not constrained:
        return stop_tokens
    return stop_tokens | {token for token in model.eos_token_ids if token < model.vocab_size}


def reported_stops(request: SharedFields, sampling: SamplingParams, model: ServedModel) -> frozenset[int]:
    """Return the tokens that become the `stop_reason`: as in vLLM, all that end the answer but the primary one."""
    stop_tokens = frozenset(sampling.stop_token_ids)
    if request.ignore_eos and not sampling.grammar:
        return stop_tokens
    return stop_tokens - {model.primary_eos}


def _logprob_ids(request: SharedFields, logprobs: int | None, vocab_size: int) -> tuple[int, ...]:
    if logprobs is None:
        raise InvalidRequest("logprob_token_ids needs logprobs", param="logprob_token_ids")
    check_size(request, "logprob_token_ids")
    given = request.logprob_token_ids or []
    check_tokens_in_vocabulary(given, vocab_size, "logprob_token_ids")
    return tuple(given)


def _logit_bias(request: SharedFields, vocab_size: int) -> tuple[TokenBias, ...]:
    """Parse biases. Token ids are decimal without sign, spaces or leading zeros, so that no id occurs twice."""
    check_size(request, "logit_bias")
    biases: list[TokenBias] = []
    for key, bias in (request.logit_bias or {}).items():
        plain = key.isascii() and key.isdigit() and len(key) < 10 and key == str(int(key))
        if not plain or int(key) >= vocab_size:
            raise InvalidRequest(
                f"the keys of logit_bias must be token ids from 0 to {vocab_size - 1}, not {key[:20]!r}",
                param="logit_bias",
            )
        if not -MAX_BIAS <= bias <= MAX_BIAS:
            raise InvalidRequest(
                f"the values of logit_bias must be between {-MAX_BIAS:g} and {MAX_BIAS:g}", param="logit_bias"
            )
        if bias:
            biases.append((int(key), bias))
    return tuple(biases)


def _min_tokens(given: int, max_tokens: int, stop_tokens: int, vocab_size: int) -> int:
    if not 0 <= given <= max_tokens:
        raise InvalidRequest(
            f"min_tokens must be from 0 to {max_tokens}, which the answer may have at most",
            param="min_tokens",
        )
    if stop_tokens >= vocab_size:
        raise InvalidRequest("min_tokens cannot be met: every token is a stop token", param="min_tokens")
    return given


def check_priority(priority: int | None, most_urgent: int) -> int:
    """Return the priority of a request. `most_urgent`: the lowest that the client may ask for."""
    if priority is None:
        return 0 if most_urgent <= 0 else most_urgent
    if not -MAX_PRIORITY <= priority <= MAX_PRIORITY:
        raise InvalidRequest(
            f"priority must be from {-MAX_PRIORITY} to {MAX_PRIORITY}; lower goes first", param="priority"
        )
    if priority < most_urgent:
        raise InvalidRequest(
            f"this API key may ask for a priority of {most_urgent} or more; lower ones are more urgent",
            param="priority",
        )
    return priority


def check_logprobs(count: int | None, field: str) -> int | None:
    if count is not None and not 0 <= count <= TOP_LOGPROBS:
        raise InvalidRequest(f"{field} must be between 0 and {TOP_LOGPROBS}", param=field)
    return count


def _top_k(value: int | None, default: int, vocab_size: int) -> int:
    """Return the effective top_k; 0 means off, as does a value that keeps the whole vocabulary."""
    if value is None:
        value = default
    elif not -1 <= value < 2**63:
        raise InvalidRequest("top_k must be positive, or 0 or -1 for off", param="top_k")
    return value if 0 < value < vocab_size else 0
