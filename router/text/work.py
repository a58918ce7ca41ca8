"""Text processing: parses bodies, renders chat prompts, tokenizes and detokenizes.

It runs in a text worker, where time and memory are limited, and for small inputs in the router. Results and refusals
are the same in both.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from common.errors import InvalidRequest, RequestError
from router.apis.tasks import READERS
from router.chat.call_formats import CallSupport
from router.grammar.constraint import Constraint
from router.grammar.grammar_work import GrammarWork
from router.requests.chat_fields import template_tools, template_variables
from router.requests.chat_input import ChatInput, with_packed_input
from router.requests.chat_rules import bounded_chat, check_chat_fields, chosen_tools
from router.requests.checks import check_name, check_tokens_in_vocabulary
from router.requests.field_rules import refuse_fields, undeclared
from router.requests.json_body import decode_json
from router.requests.openai_schema import (
    NOT_YET,
    ChatRequest,
    CompletionRequest,
    compact_completion,
    prompt_names,
    refuse_unsupported_messages,
    with_whole_ids,
)
from router.requests.prompt_length import PromptLength, prompt_length
from router.requests.tokenize_requests import (
    MAX_TEXTS,
    TOKENIZE_NOT_YET,
    DetokenizeAnswer,
    DetokenizeRequest,
    TokenizeAnswer,
    TokenizeRequest,
)
from router.templates.chat_template import ChatTemplate
from router.templates.prompt_end import prompt_end
from router.text.jobs import (
    CompileGrammar,
    Detokenize,
    EncodeTexts,
    Job,
    JobAnswer,
    JobResult,
    Payload,
    ReadChat,
    ReadCompletion,
    ReadTask,
    RenderChat,
    Tokenize,
    refusal,
    too_costly,
)
from router.tokens.tokenizer import Tokenizer

TOKEN_BYTES = array("i").itemsize
READ_SECONDS = 10.0  # CPU time for a body
RENDER_SECONDS = 1.0  # for a chat template
ENCODE_SECONDS = 20.0  # for the texts of one request
COMPILE_SECONDS = 1.0  # for a grammar; what is within its limits takes at most some 50 ms
MAX_DETOKENIZE = 1 << 20  # token ids in one request
_chat = msgspec.json.Decoder(ChatRequest)
_completion = msgspec.json.Decoder(CompletionRequest)
_CHAT_FIELDS = frozenset(ChatRequest.__struct_fields__)
_COMPLETION_FIELDS = frozenset(CompletionRequest.__struct_fields__)
_tokenize = msgspec.json.Decoder(TokenizeRequest)
_detokenize = msgspec.json.Decoder(DetokenizeRequest)
# The fields of chats that do not change the prompt are taken without effect: a client may send all of a chat.
_TOKENIZE_FIELDS = frozenset(TokenizeRequest.__struct_fields__) | _CHAT_FIELDS
_DETOKENIZE_FIELDS = frozenset(DetokenizeRequest.__struct_fields__)
_chat_input = msgspec.msgpack.Decoder(ChatInput)
_constraint = msgspec.msgpack.Decoder(Constraint)
_texts = msgspec.msgpack.Decoder(list[str])


def read_chat(raw: Payload) -> tuple[ChatRequest, tuple[str, ...]]:
    """Parse a chat body. Return it and its unknown field names. Raises InvalidRequest."""
    return with_packed_input(decode_json(raw, _chat)), undeclared(raw, _CHAT_FIELDS)


def read_completion(raw: Payload) -> tuple[CompletionRequest, tuple[str, ...]]:
    """Parse a completion body. Return it and its unknown field names. Raises InvalidRequest."""
    request = decode_json(raw, _completion)
    if request.prompt and type(request.prompt[0]) in (float, list):
        request = with_whole_ids(request)
    return request, undeclared(raw, _COMPLETION_FIELDS)


def _with_ids_that_fit(request: CompletionRequest, max_model_len: int) -> CompletionRequest:
    """Cut packed token ids as the request asks, or check that they fit. Raises InvalidRequest or ContextTooLong."""
    if not isinstance(request.prompt, list):
        return request
    length = prompt_length(request, max_model_len)
    for item, field in zip(request.prompt, prompt_names(len(request.prompt))):
        if isinstance(item, bytes):
            length.check(len(item) // TOKEN_BYTES, field)
    cut = [length.cut(item, TOKEN_BYTES) if isinstance(item, bytes) else item for item in request.prompt]
    return msgspec.structs.replace(request, prompt=cut)


class TextWork:
    """The tokenizer and the chat template of one model."""

    def __init__(
        self, tokenizer: Tokenizer, template: ChatTemplate, limit: Callable[[float], None] = lambda _: None
    ) -> None:
        """`limit(seconds)` is called before each phase of a job with the CPU time that the phase may use."""
        self._tokenizer = tokenizer
        self._template = template
        self._limit = limit
        self._grammars = GrammarWork(tokenizer)

    @classmethod
    def load(
        cls, path: Path, limit: Callable[[float], None] = lambda _: None, template: Path | None = None
    ) -> TextWork:
        """Load from a model directory; `template` is a file that replaces the model's own template.

        Raises ModelError.
        """
        return cls(Tokenizer(path), ChatTemplate(path, template), limit)

    def do(self, job: Job, payload: Payload) -> JobAnswer:
        """Run a job. It never raises for what a client sent: refusals are answers."""
        try:
            return self._do(job, payload)
        except RequestError as error:
            return refusal(error), b""
        except MemoryError:
            message, param = too_costly(job)
            return refusal(InvalidRequest(message, param=param)), b""

    def _do(self, job: Job, payload: Payload) -> JobAnswer:
        match job:
            case ReadChat():
                self._limit(READ_SECONDS)
                chat, unknown = read_chat(payload)
                return JobResult(unknown_fields=unknown), msgspec.msgpack.encode(bounded_chat(chat))
            case ReadCompletion():
                self._limit(READ_SECONDS)
                read, unknown = read_completion(payload)
                request = _with_ids_that_fit(compact_completion(read), job.max_model_len)
                return JobResult(unknown_fields=unknown), msgspec.msgpack.encode(request)
            case ReadTask():
                self._limit(READ_SECONDS)
                reader = READERS[job.api]
                packed = reader.packed(payload)
                return JobResult(unknown_fields=reader.unknown(payload)), packed
            case RenderChat():
                self._limit(RENDER_SECONDS)
                given = _chat_input.decode(payload)
                text = self._template.render(given.messages, job.end, given.tools, given.variables)
                return self._encoded([text], job.add_special_tokens, job.length, ("messages",))
            case EncodeTexts():
                texts = _texts.decode(payload)
                return self._encoded(texts, job.add_special_tokens, job.length, job.fields)
            case Tokenize():
                answer = self.tokenize(payload, job)
                return JobResult(unknown_fields=undeclared(payload, _TOKENIZE_FIELDS)), answer
            case Detokenize():
                answer = self.detokenize(payload, job)
                return JobResult(unknown_fields=undeclared(payload, _DETOKENIZE_FIELDS)), answer
            case CompileGrammar():
                self._grammars.prepare(job.vocab_size, job.eos_ids)
                self._limit(COMPILE_SECONDS)
                constraint = _constraint.decode(payload)
                return JobResult(), self._grammars.compile(constraint, job.vocab_size, job.eos_ids).encode()

    def tokenize(self, raw: Payload, job: Tokenize) -> bytes:
        """Return the response body of /tokenize. Raises InvalidRequest."""
        self._limit(READ_SECONDS)
        body = decode_json(raw, _tokenize)
        check_name(body.model, job.names)
        texts, special = self._texts_of(body, frozenset(job.template_variables), job.calls)
        self._limit(ENCODE_SECONDS)
        encoded = [self._tokenizer.encode(text, special) for text in texts]
        names: list[str | list[str]] | None = None
        if body.return_token_strs:
            names = [self._tokenizer.vocabulary_entries(tokens) for tokens in encoded]
        if isinstance(body.prompt, list):
            answer = TokenizeAnswer([*map(len, encoded)], job.max_model_len, [*encoded], names)
        else:
            [tokens] = encoded
            names = names and [*names[0]]
            answer = TokenizeAnswer(len(tokens), job.max_model_len, [*tokens], names)
        return msgspec.json.encode(answer)

    def _texts_of(
        self, body: TokenizeRequest, allowed: frozenset[str], calls: CallSupport
    ) -> tuple[Sequence[str], bool]:
        """Return the texts to encode and whether to add special tokens. Raises InvalidRequest."""
        refuse_fields(body, TOKENIZE_NOT_YET)
        if body.messages is None:
            if body.prompt is None:
                raise InvalidRequest("send a text as prompt, or a chat as messages", param="prompt")
            texts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
            return texts, body.add_special_tokens is not False
        if body.prompt is not None:
            raise InvalidRequest("prompt and messages cannot be combined; send one of them", param="messages")
        refuse_fields(body, NOT_YET)
        refuse_unsupported_messages(body.messages)
        declared = check_chat_fields(body.tools, body.messages)
        _, functions = chosen_tools(body.tool_choice, declared, body.tools, calls)
        variables = template_variables(
            body.chat_template_kwargs, body.reasoning_effort, allowed, body.reasoning, body.thinking
        )
        end = prompt_end(body.add_generation_prompt, body.continue_final_message)
        self._limit(RENDER_SECONDS)
        text = self._template.render(body.messages, end, template_tools(functions), variables)
        return [text], bool(body.add_special_tokens)

    def detokenize(self, raw: Payload, job: Detokenize) -> bytes:
        """Return the response body of /detokenize. Raises InvalidRequest."""
        self._limit(READ_SECONDS)
        body = decode_json(raw, _detokenize)
        check_name(body.model, job.names)
        ids = [each for each in body.tokens if isinstance(each, int)]
        lists = [each for each in body.tokens if isinstance(each, list)]
        if ids and lists:
            raise InvalidRequest("tokens must be token ids or lists of token ids, not both", param="tokens")
        if len(ids) + sum(map(len, lists)) > MAX_DETOKENIZE or len(lists) > MAX_TEXTS:
            raise InvalidRequest(
                f"at most {MAX_DETOKENIZE} tokens in at most {MAX_TEXTS} lists in one request", param="tokens"
            )
        for tokens in lists or [ids]:
            check_tokens_in_vocabulary(tokens, job.vocab_size, "tokens")
        self._limit(ENCODE_SECONDS)
        texts = [self._tokenizer.decode(each, bool(body.skip_special_tokens)) for each in lists or [ids]]
        found = texts if lists else texts[0]
        return msgspec.json.encode(DetokenizeAnswer(found, found))

    def encode(
        self, texts: Sequence[str], add_special_tokens: bool, length: PromptLength, fields: Sequence[str]
    ) -> list[list[int]]:
        """Tokenize texts. Raises ContextTooLong with the field of a text that leaves no room for an answer."""
        self._limit(ENCODE_SECONDS)
        for text, field in zip(texts, fields):  # check all of them before encoding the first
            length.check(self._tokenizer.least_tokens(text), field, exact=False)
        encoded = []
        for text, field in zip(texts, fields):
            tokens = self._tokenizer.encode(text, add_special_tokens)
            length.check(len(tokens), field)
            encoded.append(length.cut(tokens))
        return encoded

    def _encoded(
        self, texts: Sequence[str], add_special_tokens: bool, length: PromptLength, fields: Sequence[str]
    ) -> JobAnswer:
        encoded = self.encode(texts, add_special_tokens, length, fields)
        packed = array("i")
        for tokens in encoded:
            packed.extend(tokens)
        return JobResult(counts=tuple(map(len, encoded))), packed.tobytes()
