"""Requests of the OpenAI API as clients send them: typed and bounded. `field_rules` handles undeclared fields.

A field that would change the answer but is not supported must never be ignored silently. Such fields are listed in
NOT_YET with the values that have no effect: those values are accepted, any other value is refused by name.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from common.errors import InvalidRequest
from common.messages.generation import MAX_ALLOWED, MAX_BAD_WORDS, MAX_BIASES, MAX_LOGPROB_IDS
from router.requests.chat_fields import ChatToolChoice, Identity, Tool, ToolCall
from router.requests.constraint_fields import ConstraintFields
from router.requests.field_rules import refuse_fields
from router.requests.json_body import whole_ids
from router.requests.read_constraint import read_constraint, with_schema_texts
from router.requests.reasoning_fields import Effort, ReasoningSwitch, ThinkingSwitch

MAX_STOPS = 16
MAX_STOP_LENGTH = 256
MAX_MESSAGES = 4096
MAX_PROMPTS = 64  # prompts in one completions request
MAX_STOP_TOKENS = 128
TOKEN_LISTS = ("stop_token_ids", "allowed_token_ids", "logprob_token_ids")
MAX_BAD_WORD_LENGTH = 256  # characters
# The latter two are names of the Responses API, which vLLM takes in chats, too.
TEXT_PARTS = ("text", "input_text", "output_text")
THOUGHT_PARTS = ("thinking", "reasoning")
MAX_PARTS = 8192  # content parts over all messages, in a large body
TOP_LOGPROBS = 20

MAX_TEXT = 8 << 20  # characters
Text = Annotated[str, Meta(max_length=MAX_TEXT)]
TokenIds: TypeAlias = "list[int] | array[int]"
RequestId = Annotated[str, Meta(min_length=1, max_length=128)]
CacheSalt = Annotated[str, Meta(min_length=1, max_length=1024)]
SessionId = Annotated[str, Meta(max_length=1024)]
Completion = TypeVar("Completion", bound="CompletionRequest")


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # vLLM: usage in every chunk


NO_OPTIONS = StreamOptions()


class ImageUrl(msgspec.Struct, frozen=True):
    """An image, as a data: URL or an https URL. `detail` has no effect: every image is scaled to the model's size."""

    url: str
    detail: str | None = None


class ContentPart(msgspec.Struct, frozen=True):
    """One part of a message's content: text or reasoning, under any of their names, or image_url.

    Other types are refused.
    """

    type: str
    text: str | None = None
    image_url: ImageUrl | str | None = None
    refusal: str | None = None
    thinking: str | None = None

    @property
    def plain_text(self) -> str | None:
        """The text of a part that is text, such as the model's refusal in an earlier answer; None for other types."""
        return self.refusal if self.type == "refusal" else self.text if self.type in TEXT_PARTS else None

    @property
    def reasoning_text(self) -> str | None:
        """The text of a part that is reasoning of an earlier answer, as vLLM and SGLang take it; None otherwise."""
        given = self.text if self.thinking is None else self.thinking
        return given if self.type in THOUGHT_PARTS else None


class Message(msgspec.Struct, frozen=True):
    role: Annotated[str, Meta(min_length=1, max_length=64)]
    content: Text | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: Identity | None = None
    reasoning_content: Text | None = None
    reasoning: Text | None = None  # vLLM's name for reasoning_content
    # not supported: see MESSAGE_NOT_YET
    function_call: Any = None
    audio: Any = None

    @property
    def thoughts(self) -> str | None:
        """The reasoning that precedes the message, under whichever name it was sent."""
        for given in (self.reasoning_content, self.reasoning):
            if given is not None:
                return given
        parts = [part.reasoning_text for part in self.content] if isinstance(self.content, list) else []
        found = [each for each in parts if each is not None]
        return "".join(found) if found else None


class SharedFields(ConstraintFields, frozen=True, kw_only=True):
    """Fields of both endpoints."""

    # True for routes of SGLang and vLLM whose answers have a form of their own.
    native: ClassVar[bool] = False

    model: str | None = None
    request_id: RequestId | None = None  # vLLM: the request's id, unless a header has one
    # SGLang: the request's id, or one for each prompt
    rid: RequestId | Annotated[list[RequestId], Meta(max_length=MAX_PROMPTS)] | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    seed: int | None = None
    priority: int | None = None  # lower goes first
    allowed_token_ids: list[int] | None = None
    bad_words: list[Annotated[str, Meta(max_length=MAX_BAD_WORD_LENGTH)]] | None = None
    include_stop_str_in_output: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    add_special_tokens: bool | None = None
    # as in vLLM: cached prompt pages are shared only between requests with the same salt
    cache_salt: CacheSalt | None = None
    session_id: SessionId | None = None  # vLLM: the conversation, as in the header X-Session-Id
    n: int | None = None  # answers to each prompt
    best_of: int | None = None  # only 1 or n: see choice_count
    return_token_ids: bool | None = None  # as in vLLM, and the next one
    return_tokens_as_token_ids: bool | None = None
    return_hidden_states: bool | Literal["last"] | None = None  # as in SGLang, where `last` gives the same
    # as in vLLM: tokens whose log-probabilities are listed with each token of the answer, instead of the likeliest ones
    logprob_token_ids: list[int] | None = None
    prompt_logprobs: int | None = None  # alternatives listed with each token of the prompt
    # as in vLLM: a longer prompt is cut to this many tokens; -1: to as many as fit
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None  # left, the default, keeps the last tokens; right keeps the first ones
    # not supported yet: see NOT_YET
    use_beam_search: Any = None
    length_penalty: Any = None
    logits_processors: Any = None
    prompt_embeds: Any = None
    lora_path: Any = None

    @property
    def default_tokens(self) -> int | None:
        """The most tokens of an answer without `max_tokens`; None: what the model's settings or the context leave."""
        return None

    @property
    def min_answer_tokens(self) -> int:
        """The fewest tokens for which the prompt leaves room."""
        return 1


class ChatRequest(SharedFields, frozen=True, kw_only=True):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: Any = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Tool] | None = None
    tool_choice: str | ChatToolChoice | None = None
    functions: Any = None
    function_call: Any = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    reasoning: ReasoningSwitch | None = None
    thinking: ThinkingSwitch | None = None
    include_reasoning: bool | None = None
    separate_reasoning: bool | None = None  # SGLang: false leaves the reasoning in the content
    stream_reasoning: bool | None = None  # SGLang: false sends the reasoning in one piece
    echo: bool | None = None  # as in vLLM: what the assistant has said last precedes the answer
    return_prompt_text: bool | None = None  # as in vLLM
    # SGLang: the prompt's tokens, instead of the template's; see `with_packed_input`
    input_ids: list[Any] | None = None
    documents: Any = None
    modalities: Any = None
    audio: Any = None
    web_search_options: Any = None


class CompletionRequest(SharedFields, frozen=True, kw_only=True):
    """The body of POST /v1/completions."""

    # one text, several texts, token ids, or lists of token ids: see `prompts`; `compact_completion` packs ids
    prompt: Text | list[Any]
    logprobs: int | None = None
    echo: bool | None = None  # the prompt precedes the answer
    suffix: Any = None
    require_reasoning: bool | None = None  # SGLang: a constraint begins after the reasoning
    max_thinking_tokens: int | None = None  # SGLang's name for thinking_token_budget

    @property
    def default_tokens(self) -> int | None:
        return 16  # as at OpenAI

    @property
    def min_answer_tokens(self) -> int:
        """0 if the answer is the prompt alone: `echo` with max_tokens 0."""
        return 0 if self.echo and self.max_tokens == 0 else 1


# field -> values that have no effect
NOT_YET: dict[str, tuple[Any, ...]] = {
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "prompt_embeds": (),
    "lora_path": (),
    "chat_template": (),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "documents": ([],),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "suffix": ("",),
}

MESSAGE_NOT_YET: dict[str, tuple[Any, ...]] = {
    "function_call": (),
    "audio": (),
}


def supported_fields(request: type[SharedFields]) -> list[str]:
    """Return the supported fields of a request, sorted by name, for /server_info."""
    return sorted(set(request.__struct_fields__) - set(NOT_YET))


def refuse_unsupported(request: SharedFields) -> None:
    """Raise InvalidRequest for the first field that would change the answer but is not supported."""
    refuse_fields(request, NOT_YET)
    if isinstance(request, ChatRequest):
        refuse_unsupported_messages(request.messages)


def refuse_unsupported_messages(messages: Sequence[Message]) -> None:
    """Raise InvalidRequest for the first field of a message that is not supported."""
    for index, message in enumerate(messages):
        refuse_fields(message, MESSAGE_NOT_YET, f"messages[{index}].")


def prompts(request: CompletionRequest, max_tokens: int) -> list[str | TokenIds]:
    """Return the prompts of a completions request, one per choice. Raises InvalidRequest("prompt").

    Token ids are checked only in prompts of at most `max_tokens` tokens; longer ones are later refused for their
    length.
    """
    prompt = request.prompt
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise InvalidRequest("prompt is empty; send a text or token ids", param="prompt")
    if type(prompt[0]) is int:
        _check_ids(prompt, max_tokens)
        return [prompt]
    if len(prompt) > MAX_PROMPTS:
        raise InvalidRequest(
            f"{len(prompt)} prompts in one request; the limit is {MAX_PROMPTS}", param="prompt"
        )
    for item in prompt:
        if isinstance(item, list):
            _check_ids(item, max_tokens)
        elif not isinstance(item, str | bytes):
            raise InvalidRequest(_PROMPT_KINDS, param="prompt")
    return [array("i", item) if isinstance(item, bytes) else item for item in prompt]


def with_whole_ids(request: Completion) -> Completion:
    """Return a request whose prompt is a list with integers where its token ids are numbers like 16.0."""
    listed = whole_ids([*request.prompt])
    given = [whole_ids(item) if isinstance(item, list) else item for item in listed]
    return msgspec.structs.replace(request, prompt=given)


def compact_chat(request: ChatRequest) -> ChatRequest:
    """Return the request if it is cheap to decode: a large body may hold millions of small values.

    Raises InvalidRequest for what exceeds a limit or would be refused later anyway.
    """
    _check_sizes(request)
    parts = sum(len(message.content) for message in request.messages if isinstance(message.content, list))
    if parts > MAX_PARTS:
        raise InvalidRequest(
            f"the messages have {parts} parts; the limit is {MAX_PARTS}: join adjacent text parts",
            param="messages",
        )
    return with_schema_texts(request)


def compact_completion(request: Completion) -> Completion:
    """Compact a completions request like `compact_chat`.

    Token ids are packed as int32; -1 replaces out-of-range ids.
    """
    _check_sizes(request)
    return with_packed_ids(with_schema_texts(request))


def with_packed_ids(request: Completion) -> Completion:
    """Return the request without lists of token ids, whose items a garbage collection would visit.

    They are packed as int32; -1 replaces out-of-range ids. Raises InvalidRequest("prompt").
    """
    prompt: str | list[Any] = request.prompt
    if isinstance(prompt, list) and prompt and type(prompt[0]) is int:
        _check_ids(prompt, len(prompt))
        return msgspec.structs.replace(request, prompt=[packed_ids(prompt)])
    if isinstance(prompt, str) or all(isinstance(item, str | bytes) for item in prompt):
        return request
    given = prompts(request, len(prompt))
    for item in given:
        if isinstance(item, list):
            _check_ids(item, len(item))
    packed = [item if isinstance(item, str) else packed_ids(item) for item in given]
    return msgspec.structs.replace(request, prompt=packed)


def _check_sizes(request: SharedFields) -> None:
    """Refuse unsupported fields and lists that are too long, without looking at their items."""
    refuse_unsupported(request)
    read_constraint(request)
    check_stops(request)
    for field in _LIST_LIMITS:
        check_size(request, field)
    for field in request.__struct_fields__:  # msgpack cannot encode larger integers
        value = getattr(request, field)
        values = value if field in TOKEN_LISTS and value else (value,)
        if any(type(each) is int and not -(2**63) <= each < 2**64 for each in values):
            raise InvalidRequest(f"{field} must fit in 64 bits", param=field)


# field -> how many items it may have, and what they are
_LIST_LIMITS = {
    "stop_token_ids": (MAX_STOP_TOKENS, "token ids"),
    "allowed_token_ids": (MAX_ALLOWED, "token ids"),
    "logprob_token_ids": (MAX_LOGPROB_IDS, "token ids"),
    "bad_words": (MAX_BAD_WORDS // 2, "words"),
    "logit_bias": (MAX_BIASES, "tokens"),
}


def check_size(request: SharedFields, field: str) -> None:
    """Raise InvalidRequest if a field with a bounded number of items has more of them."""
    most, items = _LIST_LIMITS[field]
    if len(getattr(request, field) or ()) > most:
        raise InvalidRequest(f"{field} takes at most {most} {items}", param=field)


def check_stops(request: SharedFields) -> list[str]:
    """Return the stop strings. Raises InvalidRequest("stop")."""
    stops = [request.stop] if isinstance(request.stop, str) else request.stop or []
    if len(stops) > MAX_STOPS:
        raise InvalidRequest(f"{len(stops)} stop strings; the limit is {MAX_STOPS}", param="stop")
    for stop in stops:
        if not 1 <= len(stop) <= MAX_STOP_LENGTH:
            raise InvalidRequest(f"a stop string must have 1 to {MAX_STOP_LENGTH} characters", param="stop")
    return stops


def packed_ids(ids: TokenIds) -> bytes:
    """Return token ids as int32; -1 replaces those out of range."""
    try:
        return array("i", ids).tobytes()
    except OverflowError:
        return array("i", (each if 0 <= each < 1 << 31 else -1 for each in ids)).tobytes()


def prompt_names(count: int) -> list[str]:
    """Return the names of `count` prompts in refusals."""
    return ["prompt"] if count == 1 else [f"prompt[{index}]" for index in range(count)]


_PROMPT_KINDS = (
    "prompt must be a string, a list of strings, a list of token ids, or a list of lists of token ids"
)


def _check_ids(ids: list[Any], max_tokens: int) -> None:
    if len(ids) <= max_tokens and not {*map(type, ids)} <= {int}:
        raise InvalidRequest(_PROMPT_KINDS, param="prompt")
