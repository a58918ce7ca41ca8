"""Makes the generation requests of one prompt, and the objects that turn their tokens into text."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from aiohttp import web
from msgspec.structs import replace

from common.errors import InvalidRequest
from common.messages.generation import ThinkingLimit, TokenRules
from router.answers.prompt_pieces import PromptOnly, ShownPrompt
from router.dispatch.generation import GenerationRequest, PromptBatch, PromptImage
from router.dispatch.shared_prompt import shares
from router.http.client import cache_salt, client_key, session_key
from router.http.errors import arrived_key, request_id_key
from router.requests.checks import (
    ServedModel,
    check_logprobs,
    check_priority,
    reported_stops,
    sampling_params,
)
from router.requests.choice_count import choice_count, samplings
from router.requests.hidden_states import answer_states
from router.requests.openai_schema import CompletionRequest, SharedFields, check_stops
from router.requests.thinking_budget import with_limit
from router.tokens.text_stream import TextStream
from router.tokens.tokenizer import Tokenizer
from router.tracing.traces import trace_key

MAX_SCORES = 1_000_000  # log-probabilities of one prompt


class Choice(msgspec.Struct, frozen=True, eq=False):
    """One answer of a request, ready to be generated."""

    request: GenerationRequest
    text: TextStream | PromptOnly
    shown: ShownPrompt | None = None  # what the answer shows of its prompt


def prompt_lengths(choices: Sequence[Choice]) -> list[int]:
    """Return the number of prompt tokens of each choice."""
    return [len(choice.request.token_ids) for choice in choices]


class Prompt(msgspec.Struct, frozen=True, eq=False):
    """One prompt of a request."""

    tokens: Sequence[int]  # an array: see GenerationRequest
    index: int = 0  # among the prompts of the request
    images: tuple[PromptImage, ...] = ()
    text: str | None = None  # without special tokens; None: the client sent token ids or messages
    thinking: ThinkingLimit | None = None  # of the answer
    identity: str | None = None  # its own id; None: its answers are numbered under that of the request


class AnswerOptions(msgspec.Struct, frozen=True, eq=False):
    """Options of all answers of a request, as its handler has read them from the body."""

    max_field: str  # the name under which the client sent max_tokens
    logprobs: int | None
    grammar: str
    rules: TokenRules | None
    kept: frozenset[int] = frozenset()  # special tokens that are never skipped
    min_answer_tokens: int = 1  # 0: the prompt is the whole answer


def choice_ids(request_id: str, prompt: Prompt, count: int) -> list[tuple[str, ...]]:
    """Return the ids of each of the `count` answers to a prompt: first its own, then others that mean it, too."""
    name, first = request_id, prompt.index * count
    others: tuple[str, ...] = ()
    if prompt.identity is not None:
        name, first, others = prompt.identity, 0, (request_id,)
    numbers = range(first, first + count)
    return [(f"{name}-{number}", name, *others) if number else (name, *others) for number in numbers]


class ChoiceMaker:
    """Makes the choices of requests to one model."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def make(
        self,
        request: web.Request,
        body: SharedFields,
        model: ServedModel,
        options: AnswerOptions,
        prompt: Prompt,
        batch: PromptBatch,
    ) -> list[Choice]:
        """Return the choices of one prompt. Raises InvalidRequest."""
        tokens, logprobs, rules = prompt.tokens, options.logprobs, options.rules
        wanted = getattr(body, options.max_field)
        if wanted is None and body.default_tokens is not None:
            wanted = min(body.default_tokens, model.max_model_len - len(tokens))
        taken = len(tokens)
        prompt_only = options.min_answer_tokens == 0
        if prompt_only:
            # The prefill node draws a token, which is dropped and takes no room in the context.
            wanted, taken = 1, taken - 1
        sampling = sampling_params(body, taken, model, wanted, options.max_field, logprobs, options.grammar)
        if prompt.thinking is not None:
            rules = with_limit(rules, prompt.thinking)
        if rules is not None:
            sampling = replace(sampling, token_rules=rules)
        echo = isinstance(body, CompletionRequest) and body.echo
        scores = shown = None
        if echo or body.prompt_logprobs is not None:
            scores = _prompt_logprobs(body, logprobs, len(tokens))
        if scores is not None:
            sampling = replace(sampling, prompt_logprobs=scores)
        if echo:
            shown = ShownPrompt.echoed(tokens, prompt.text, self._tokenizer)
        elif scores is not None:
            shown = ShownPrompt(tokens)
        client = request[client_key]
        count = choice_count(body)
        priority = check_priority(body.priority, client.most_urgent)
        session = session_key(client, request.headers, body.session_id)
        reported = reported_stops(body, sampling, model)
        choices, trace = list[Choice](), request.get(trace_key)
        ids = choice_ids(request[request_id_key], prompt, count)
        for own, share, (identity, *others) in zip(
            samplings(sampling, count), shares(count), ids, strict=True
        ):
            asked = GenerationRequest(
                identity,
                tokens,
                own,
                streamed=bool(body.stream),
                images=prompt.images,
                client=client.name,
                weight=client.weight,
                salt=cache_salt(client.tenant, body.cache_salt),
                priority=priority,
                session=session,
                batch=batch,
                share=share,
                arrived=request[arrived_key],
                trace=trace if trace is None or not (prompt.index or choices) else trace.sibling(),
                states=answer_states(body, model.states, len(tokens), own.max_tokens),
                known_as=tuple(others),
            )
            decoder = self._tokenizer.stream(body.skip_special_tokens is not False, tokens, options.kept)
            include_stop = bool(body.include_stop_str_in_output)
            ends = own.stop_token_ids if options.grammar else None
            answer = TextStream(decoder, check_stops(body), include_stop, own.min_tokens, ends, reported)
            choices.append(Choice(asked, PromptOnly() if prompt_only else answer, shown))
        return choices


def _prompt_logprobs(body: SharedFields, logprobs: int | None, tokens: int) -> int | None:
    """Return how many likeliest tokens are wanted in place of each prompt token; None: no log-probabilities."""
    wanted = check_logprobs(body.prompt_logprobs, "prompt_logprobs")
    if wanted is not None and body.stream:
        raise InvalidRequest(
            "prompt_logprobs are not streamed; send stream: false, or echo with logprobs",
            param="prompt_logprobs",
        )
    if isinstance(body, CompletionRequest) and body.echo and logprobs is not None:
        wanted = max(logprobs, wanted or 0)
    others = (wanted or 0) + len(body.logprob_token_ids or ())
    if wanted is not None and tokens * (others + 1) > MAX_SCORES:
        raise InvalidRequest(
            f"log-probabilities of a prompt may have {MAX_SCORES} values; {tokens} tokens with {others} "
            "alternatives or named tokens each need more: ask for fewer, or shorten the prompt",
            param="prompt_logprobs" if body.prompt_logprobs is not None else "logprobs",
        )
    return wanted
