"""Messages between the router and its text workers.

A job and its answer each travel as a head (msgpack) and a payload (bytes whose format the job defines). Errors are sent
by code, so a client gets the same refusal whether its request was read in the router or in a worker.
"""

from __future__ import annotations

import msgspec

from common.errors import RequestError, from_code
from router.chat.call_formats import CallSupport
from router.requests.prompt_length import PromptLength
from router.templates.prompt_end import PromptEnd


class WorkerSettings(msgspec.Struct, frozen=True, array_like=True):
    """The first frame to a worker."""

    model_path: str
    max_answer_bytes: int
    nice: int = 0  # niceness of the process
    manifest: str | None = None  # the model directory's: each worker verifies it before it reads the files
    chat_template: str | None = None  # file of a template that replaces the model's own


class ReadChat(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Payload: the body. Answer: the ChatRequest as msgpack, compacted by `compact_chat`."""


class ReadCompletion(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Payload: the body. Answer: the CompletionRequest as msgpack, its token ids packed as int32."""

    max_model_len: int


class RenderChat(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Payload: a ChatInput as msgpack. Answer: the token ids of its prompt as int32."""

    add_special_tokens: bool
    length: PromptLength
    end: PromptEnd


class EncodeTexts(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Payload: a list of texts as msgpack. Answer: the token ids of all of them as int32, in order."""

    add_special_tokens: bool
    length: PromptLength
    fields: tuple[str, ...]  # the name of each text in error messages


class Tokenize(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """Payload: the body of /tokenize. Answer: the JSON of its response."""

    names: tuple[str, ...]  # of the served model
    max_model_len: int
    template_variables: tuple[str, ...]  # names that clients may set
    calls: CallSupport


class Detokenize(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """Payload: the body of /detokenize. Answer: the JSON of its response."""

    names: tuple[str, ...]
    vocab_size: int


class CompileGrammar(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """Payload: a Constraint as msgpack. Answer: the text of its grammar, which compiles."""

    vocab_size: int
    eos_ids: tuple[int, ...]
    field: str  # the name of the constraint in error messages


class ReadTask(msgspec.Struct, frozen=True, array_like=True, tag=16):
    """Payload: the body of an API that is translated. Answer: its task as msgpack, see router.apis.tasks."""

    api: str  # key of READERS


Job = ReadTask | ReadChat | ReadCompletion | RenderChat | EncodeTexts | Tokenize | Detokenize | CompileGrammar


class JobResult(msgspec.Struct, frozen=True, array_like=True):
    """The head of an answer. `error` and `defect` are empty if the job succeeded."""

    counts: tuple[int, ...] = ()  # number of tokens of each text
    error: str = ""  # code of a RequestError
    message: str = ""
    param: str | None = None
    defect: str = ""  # traceback of an unexpected exception, for the log
    unknown_fields: tuple[str, ...] = ()  # unknown names in a body

    def check(self) -> None:
        """Raise the error that the worker reported, if any."""
        if self.defect:
            raise RuntimeError(f"a text worker failed:\n{self.defect}")
        if self.error:
            raise from_code(self.error, self.message, self.param)


Payload = bytes | bytearray
JobAnswer = tuple[JobResult, Payload]


def refusal(error: RequestError) -> JobResult:
    return JobResult(error=error.code, message=str(error), param=error.param)


def too_costly(job: Job) -> tuple[str, str | None]:
    """Return the message and the field of the refusal when a job needs more time or memory than a worker has."""
    match job:
        case RenderChat():
            return (
                "turning the messages into a prompt takes too much time or memory; shorten them",
                "messages",
            )
        case EncodeTexts():
            return "encoding the prompt takes too much time or memory; shorten it", job.fields[0]
        case Tokenize():
            return "encoding the prompt takes too much time or memory; shorten it", "prompt"
        case Detokenize():
            return "decoding the tokens takes too much time or memory; send fewer", "tokens"
        case CompileGrammar():
            return "the grammar takes too much time or memory to compile; send a simpler one", job.field
    return "reading the body takes too much time or memory; send a smaller one", None
