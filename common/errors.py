"""The exception tree. Each error knows its HTTP status and the code that is sent between processes.

    TandemError
    +-- ConfigError            start-up only: a config key, its path and the remedy
    +-- ModelError             start-up only: a checkpoint that cannot be served, and what is supported
    |   +-- TakesNoEmbeddings  a ValueError too: it would embed the placeholders of images
    +-- ProtocolError          a peer sent a message that its inbox does not allow
    |   +-- HandshakeRefused   peers that differ in version, layout or model
    |   +-- RecordError        a handoff record that is torn, stale or corrupt
    +-- RankFailed             a rank of this node has ended, does not answer or has diverged: the node ends
    +-- NodeRefused            no router takes this node: it ends
    +-- RequestError           one request ends, all others continue
        +-- InvalidRequest     400  the client can correct it; names the field
        |   +-- ContextTooLong 400  more tokens than the model's context holds
        |   +-- InvalidGrammar 400  a grammar or schema that is wrong, not supported or too complex
        +-- Unauthorized       401  no API key, or one that is unknown or has expired
        +-- Forbidden          403  a key without the scope, or a foreign Host or Origin header
        +-- ModelNotFound      404  `model` is not the served one
        +-- UnknownNode        404  an operator names a process that this router does not know
        +-- Conflict           409  an operator's order contradicts what is being done already
        +-- RequestTooLarge    413  body over the limit
        +-- UnsupportedMedia   415  a body that is not plain JSON
        +-- RateLimited        429  a client is over its limit; tells it when to retry
        +-- Overloaded         503  a bounded queue is full; retry later
        +-- Unavailable        503  no node of a role can serve
        +-- DeadlineExceeded   408  the request's own deadline passed
        +-- TransferFailed     503  the KV pages did not arrive; the request may be placed again
        |   +-- ChecksumFailed 503  a page differs from what was sent; the request may be placed again
        +-- NodeLost           503  the node died; the request may be placed again
        +-- Moved              503  its decode node drains before its prompt has begun; it is placed again
        +-- Preempted          503  pages ran out and the KV could not be kept; the request may be placed again
        +-- CacheDamaged       503  cached KV had changed in memory; the request may be placed again
        +-- ClientGone         499  the client has disconnected
        +-- NoAnswer           504  a node did not answer an operator's order in time, or not carry it out
        +-- InternalError      500  a defect; details only in the log
        +-- PoisonRequest      500  nodes crashed whenever they ran this request; it is not run again

`code` is sent between nodes and router (`Failed.code`); over HTTP it is `error.code` if OpenAI has a name for it, or
has no status of its own. `retryable` means that the router may place the request again after such a failure of an
attempt. `Overloaded` is not `retryable`: a full queue is not a failed attempt, and the router has its own rule for it
(`Retries` in router/dispatch/retries.py tries other nodes, and lets requests that were accepted before wait for room).
"""

from __future__ import annotations

from typing import ClassVar


class TandemError(Exception):
    """Root of the tree. `str(error)` is a sentence for people."""


class ConfigError(TandemError):
    """A configuration that cannot be served. `path` is the key ("router.port"), the text states the remedy.

    A text that is too long quotes a long value: it is cut in the middle, since the remedy is at its end.
    """

    MAX_CHARACTERS: ClassVar[int] = 2000
    CUT_TO: ClassVar[tuple[int, int]] = (300, 700)  # characters at the beginning and at the end

    def __init__(self, path: str, problem: str) -> None:
        text = f"{path}: {problem}" if path else problem
        if len(text) > self.MAX_CHARACTERS:
            begin, end = self.CUT_TO
            text = f"{text[:begin]} ... (cut) ... {text[-end:]}"
        super().__init__(text)
        self.path = path


class ModelError(TandemError):
    """A model directory that cannot be served. The text is truncated, since it may quote untrusted input."""

    MAX_CHARACTERS: ClassVar[int] = 2000

    def __init__(self, problem: str) -> None:
        most = self.MAX_CHARACTERS
        cut = problem if len(problem) <= most else f"{problem[: most - 20]} ... (cut)"
        super().__init__(cut)


class TakesNoEmbeddings(ModelError, ValueError):
    """A model that reads only token ids, although prompts are embeddings of text and images."""


class ProtocolError(TandemError):
    """A peer sent something that the protocol does not allow."""


class HandshakeRefused(ProtocolError):
    """Two peers cannot work together; both log the text, which is a sentence."""


class RecordError(ProtocolError):
    """A handoff record that must not be used. `cause` is a short metric label: magic, crc, generation, length ..."""

    def __init__(self, cause: str, message: str) -> None:
        super().__init__(message)
        self.cause = cause


class NodeRefused(TandemError):
    """No router takes this node, for the reason that one of them gave."""


class RankFailed(TandemError):
    """A rank of this node has ended, does not answer or computes something else; the other ranks cannot go on.

    `rank` is the one that has failed, which a rank may have learnt from another one.
    """

    def __init__(self, rank: int, problem: str) -> None:
        super().__init__(problem)
        self.rank = rank


class RequestError(TandemError):
    """One request ends with this error; no other request is affected."""

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal_error"
    type: ClassVar[str] = "server_error"
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class InvalidRequest(RequestError):
    """The client can correct the request: `param` names the field."""

    status = 400
    code = "invalid_value"
    type = "invalid_request_error"


class ContextTooLong(InvalidRequest):
    """Prompt and completion exceed the context; clients recognise OpenAI's code for this and shorten the prompt."""

    code = "context_length_exceeded"


class InvalidGrammar(InvalidRequest):
    """A grammar or schema cannot constrain an answer, or became too complex in the middle of one."""

    code = "invalid_grammar"


class Unauthorized(RequestError):
    """The request has no API key that is valid for this route."""

    status = 401
    code = "invalid_api_key"
    type = "invalid_request_error"


class Forbidden(RequestError):
    """The client is known, or needs no key, but may not do this."""

    status = 403
    code = "permission_denied"
    type = "invalid_request_error"


class ModelNotFound(RequestError):
    """`model` names a model that is not served here."""

    status = 404
    code = "model_not_found"
    type = "invalid_request_error"


class UnknownNode(RequestError):
    """An operator's order names a process that this router does not know."""

    status = 404
    code = "unknown_node"
    type = "invalid_request_error"


class Conflict(RequestError):
    """An operator's order contradicts what is being done already."""

    status = 409
    code = "conflict"
    type = "invalid_request_error"


class RequestTooLarge(RequestError):
    """The HTTP body is over the limit."""

    status = 413
    code = "request_too_large"
    type = "invalid_request_error"


class UnsupportedMedia(RequestError):
    """The HTTP body is not declared as JSON, or is compressed."""

    status = 415
    code = "unsupported_media_type"
    type = "invalid_request_error"


class RateLimited(RequestError):
    """The client is over its limit, until `retry_after` seconds from now."""

    status = 429
    code = "rate_limit_exceeded"
    type = "rate_limit_error"

    def __init__(self, message: str, *, param: str | None = None, retry_after: float = 1.0) -> None:
        super().__init__(message, param=param)
        self.retry_after = retry_after


class Overloaded(RequestError):
    """A bounded queue is full; there may be room `retry_after` seconds from now, which is kept within 1 to 60."""

    status = 503
    code = "overloaded"

    def __init__(self, message: str, *, param: str | None = None, retry_after: float = 1.0) -> None:
        super().__init__(message, param=param)
        self.retry_after = min(max(retry_after, 1.0), 60.0)


class Unavailable(RequestError):
    """No node of a role can serve at present."""

    status = 503
    code = "unavailable"


class DeadlineExceeded(RequestError):
    """The request's own deadline passed."""

    status = 408
    code = "deadline_exceeded"


class TransferFailed(RequestError):
    """The KV pages or the record did not arrive completely."""

    status = 503
    code = "transfer_failed"
    retryable = True


class ChecksumFailed(TransferFailed):
    """A KV page differs from what the prefill node sent."""

    code = "checksum_failed"


class NodeLost(RequestError):
    """The node that held the request has died."""

    status = 503
    code = "node_lost"
    retryable = True


class Moved(RequestError):
    """The prompt has not begun, and its decode node drains: another pair takes it. This is not a failed attempt."""

    status = 503
    code = "moved"
    retryable = True


class Preempted(RequestError):
    """A decode node ran out of pages and of backup memory: the request is prefilled again with its output so far."""

    status = 503
    code = "preempted"
    retryable = True


class CacheDamaged(RequestError):
    """Cached KV that the request reuses is not what was stored. It is not used again: another attempt computes it."""

    status = 503
    code = "cache_damaged"
    retryable = True


class ClientGone(RequestError):
    """The client has disconnected."""

    status = 499
    code = "client_gone"


class NoAnswer(RequestError):
    """A node did not answer an operator's order in time; it may still follow it."""

    status = 504
    code = "no_answer"


class InternalError(RequestError):
    """A defect in tandem; the log has the details under the request id."""


class PoisonRequest(RequestError):
    """Nodes crashed whenever they ran this request; it is refused for a while."""

    code = "poison_request"


BY_CODE: dict[str, type[RequestError]] = {
    cls.code: cls
    for cls in (
        InvalidRequest,
        ContextTooLong,
        InvalidGrammar,
        Unauthorized,
        Forbidden,
        ModelNotFound,
        UnknownNode,
        Conflict,
        RequestTooLarge,
        UnsupportedMedia,
        RateLimited,
        Overloaded,
        Unavailable,
        DeadlineExceeded,
        TransferFailed,
        ChecksumFailed,
        NodeLost,
        Moved,
        Preempted,
        CacheDamaged,
        ClientGone,
        NoAnswer,
        InternalError,
        PoisonRequest,
    )
}


def from_code(code: str, message: str, param: str | None = None) -> RequestError:
    """Rebuild the error that a node reported; a code from a newer node becomes `InternalError`."""
    return BY_CODE.get(code, InternalError)(message, param=param)
