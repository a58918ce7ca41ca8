"""Bodies of the translated APIs: each is read into a task, which contains the chat or completions request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec

from common.errors import InvalidRequest
from router.apis.generate_request import (
    GenerateRequest,
    GenerateSampling,
    GenerateTask,
    names_of,
    read_generate,
    sampling_names,
)
from router.apis.messages_request import MessagesRequest, MessagesTask, read_count, read_messages
from router.apis.renamed_fields import renamed_fields
from router.apis.responses_request import ResponsesRequest, ResponsesTask, read_responses
from router.apis.tokens_request import (
    TOKENS_NAMES,
    TokensRequest,
    TokensSampling,
    TokensTask,
    read_tokens,
)
from router.requests.chat_rules import bounded_chat
from router.requests.field_rules import undeclared, undeclared_inside
from router.requests.openai_schema import compact_completion

T = TypeVar("T", bound=msgspec.Struct)
ChatTask = TypeVar("ChatTask", MessagesTask, ResponsesTask)


@dataclass(frozen=True, slots=True)
class TaskReader(Generic[T]):
    """The reader of one API's bodies.

    Attributes:
        api: its name in jobs of text workers.
        fields: the fields of a body.
        inner: a field that is an object, or a list of objects, and the fields of each.
        read: parses a body. Raises InvalidRequest.
        compact: makes the same task of a large body cheap to decode, see `bounded_chat`. Raises InvalidRequest.
    """

    api: str
    kind: type[T]
    fields: frozenset[str]
    read: Callable[[bytes | bytearray], T]
    compact: Callable[[T], T]
    inner: tuple[str, frozenset[str]] | None = None

    def unknown(self, raw: bytes | bytearray) -> tuple[str, ...]:
        """Return the unknown names in a body. Raises InvalidRequest for those that are known but not served."""
        found = undeclared(raw, self.fields)
        return found if self.inner is None else (*found, *undeclared_inside(raw, *self.inner))

    def packed(self, raw: bytes | bytearray) -> bytes:
        """Read a body in a text worker. Raises InvalidRequest."""
        task = self.compact(self.read(raw))
        try:
            return msgspec.msgpack.encode(task)
        except OverflowError as error:
            raise InvalidRequest("integers must fit in 64 bits") from error

    def unpacked(self, packed: bytes | bytearray) -> T:
        return msgspec.msgpack.decode(packed, type=self.kind)


def _compact_generate(task: GenerateTask) -> GenerateTask:
    own = []
    for index, each in enumerate(task.own):
        with renamed_fields(sampling_names(index)):
            own.append(compact_completion(each))
    with renamed_fields(names_of(task)):
        completion = compact_completion(task.completion)
    return msgspec.structs.replace(task, completion=completion, own=tuple(own))


def _compact_tokens(task: TokensTask) -> TokensTask:
    with renamed_fields(TOKENS_NAMES):
        return TokensTask(completion=compact_completion(task.completion))


def _compact_chat(task: ChatTask) -> ChatTask:
    with renamed_fields(task.places):
        return msgspec.structs.replace(task, chat=bounded_chat(task.chat))


GENERATE = TaskReader(
    "generate",
    GenerateTask,
    frozenset(GenerateRequest.__struct_fields__),
    read_generate,
    _compact_generate,
    ("sampling_params", frozenset(GenerateSampling.__struct_fields__)),
)
TOKENS = TaskReader(
    "tokens",
    TokensTask,
    frozenset(TokensRequest.__struct_fields__),
    read_tokens,
    _compact_tokens,
    ("sampling_params", frozenset(TokensSampling.__struct_fields__)),
)
RESPONSES: TaskReader[ResponsesTask] = TaskReader(
    "responses",
    ResponsesTask,
    frozenset(ResponsesRequest.__struct_fields__),
    read_responses,
    _compact_chat,
)
MESSAGES: TaskReader[MessagesTask] = TaskReader(
    "messages", MessagesTask, frozenset(MessagesRequest.__struct_fields__), read_messages, _compact_chat
)
COUNT: TaskReader[MessagesTask] = TaskReader(
    "count_tokens",
    MessagesTask,
    # what else a request for an answer has does not change its prompt
    frozenset(MessagesRequest.__struct_fields__),
    read_count,
    _compact_chat,
)
READERS: dict[str, TaskReader[Any]] = {
    reader.api: reader for reader in (GENERATE, TOKENS, RESPONSES, MESSAGES, COUNT)
}
