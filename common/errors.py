"""The exception tree. Each error knows its HTTP status and the code that crosses the wire.

    TandemError
    +-- ConfigError            start-up only: a key, its path and the remedy
    +-- ModelError             start-up only: a checkpoint that cannot be served, and what is supported
    |   +-- TakesNoEmbeddings  a ValueError too: it would embed the placeholders of images
    +-- ProtocolError          a peer said something that its inbox does not allow
    |   +-- HandshakeRefused   peers that differ in version, layout or model
    |   +-- RecordError        a handoff record that is torn, stale or corrupt
    +-- RequestError           one request ends, all others go on
        +-- InvalidRequest     400  the client can mend it; names the field
        |   +-- ContextTooLong 400  more tokens than the model's context holds
        +-- Unauthorized       401  no API key, or one that is unknown or has expired
        +-- Forbidden          403  a key without the scope, or a foreign Host or Origin header
        +-- ModelNotFound      404  `model` is not the served one
        +-- RequestTooLarge    413  body over the limit
        +-- UnsupportedMedia   415  a body that is not plain JSON
        +-- RateLimited        429  a client is over its limit; it knows when to come back
        +-- Overloaded         503  a bounded queue is full; retry later
        +-- Unavailable        503  no node of a role can serve
        +-- DeadlineExceeded   408  the request's own deadline passed
        +-- TransferFailed     503  the KV pages did not arrive; the request may be placed again
        |   +-- ChecksumFailed 503  a page differs from what was sent; the request may be placed again
        +-- NodeLost           503  the node died; the request may be placed again
        +-- Preempted          503  pages ran out and the KV could not be kept; the request may be placed again
        +-- ClientGone         499  nobody listens any more
        +-- InternalError      500  a defect; details only in the log
        +-- PoisonRequest      500  nodes crashed whenever they ran this request; it is not run again

`code` is what crosses the wire between nodes and router (`Failed.code`), and what stands in `error.code` over HTTP
where OpenAI has a name for it, or no number of its own. `retryable`: the router may place the request again.
"""

from __future__ import annotations

from typing import ClassVar


class TandemError(Exception):
    """Root of the tree. `str(error)` is a sentence for a person."""


class ConfigError(TandemError):
    """A configuration that cannot be served. `path` names the key ("router.port"), the text says the remedy."""

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(f"{path}: {problem}" if path else problem)
        self.path = path


class ModelError(TandemError):
    """A model directory that cannot be served. The text is cut: it may quote what a stranger wrote."""

    MAX_CHARACTERS: ClassVar[int] = 2000

    def __init__(self, problem: str) -> None:
        most = self.MAX_CHARACTERS
        cut = problem if len(problem) <= most else f"{problem[: most - 20]} ... (cut)"
        super().__init__(cut)


class TakesNoEmbeddings(ModelError, ValueError):
    """A model that reads token ids alone, where prompts are embeddings of text and images."""


class ProtocolError(TandemError):
    """A peer sent something that the protocol does not allow."""


class HandshakeRefused(ProtocolError):
    """Two peers cannot work together; the text is the sentence that both log."""


class RecordError(ProtocolError):
    """A handoff record that must not be used. `cause` is a short metric label: magic, crc, generation, length ..."""

    def __init__(self, cause: str, message: str) -> None:
        super().__init__(message)
        self.cause = cause


class RequestError(TandemError):
    """One request ends with this error; nothing else is affected."""

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal_error"
    type: ClassVar[str] = "server_error"
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class InvalidRequest(RequestError):
    """The client can mend it: `param` names the field."""

    status = 400
    code = "invalid_value"
    type = "invalid_request_error"


class ContextTooLong(InvalidRequest):
    """Prompt and completion are more than the context holds; clients know OpenAI's name for this and cut the prompt."""

    code = "context_length_exceeded"


class Unauthorized(RequestError):
    """The request carries no API key that opens this route."""

    status = 401
    code = "invalid_api_key"
    type = "invalid_request_error"


class Forbidden(RequestError):
    """The client is known, or needs no key, and may not do this."""

    status = 403
    code = "permission_denied"
    type = "invalid_request_error"


class ModelNotFound(RequestError):
    """`model` names something that is not served here."""

    status = 404
    code = "model_not_found"
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
    """The client is over its limit; `retry_after` seconds from now it is not."""

    status = 429
    code = "rate_limit_exceeded"
    type = "rate_limit_error"

    def __init__(self, message: str, *, param: str | None = None, retry_after: float = 1.0) -> None:
        super().__init__(message, param=param)
        self.retry_after = retry_after


class Overloaded(RequestError):
    """A bounded queue is full; `retry_after` seconds from now there may be room."""

    status = 503
    code = "overloaded"

    def __init__(self, message: str, *, param: str | None = None, retry_after: float = 1.0) -> None:
        super().__init__(message, param=param)
        self.retry_after = retry_after


class Unavailable(RequestError):
    """No node of a role can serve just now."""

    status = 503
    code = "unavailable"


class DeadlineExceeded(RequestError):
    """The request's own deadline passed."""

    status = 408
    code = "deadline_exceeded"


class TransferFailed(RequestError):
    """The KV pages or the record did not arrive whole."""

    status = 503
    code = "transfer_failed"
    retryable = True


class ChecksumFailed(TransferFailed):
    """A KV page is not what the prefill node sent."""

    code = "checksum_failed"


class NodeLost(RequestError):
    """The node that held the request is gone."""

    status = 503
    code = "node_lost"
    retryable = True


class Preempted(RequestError):
    """A decode node ran out of pages and of backup memory: the request is prefilled again with what it has said."""

    status = 503
    code = "preempted"
    retryable = True


class ClientGone(RequestError):
    """Nobody listens any more."""

    status = 499
    code = "client_gone"


class InternalError(RequestError):
    """A defect in tandem: the log has the details under the request id."""


class PoisonRequest(RequestError):
    """Nodes crashed whenever they ran this request: it is refused for a while."""

    code = "poison_request"


BY_CODE: dict[str, type[RequestError]] = {
    cls.code: cls
    for cls in (
        InvalidRequest,
        ContextTooLong,
        Unauthorized,
        Forbidden,
        ModelNotFound,
        RequestTooLarge,
        UnsupportedMedia,
        RateLimited,
        Overloaded,
        Unavailable,
        DeadlineExceeded,
        TransferFailed,
        ChecksumFailed,
        NodeLost,
        Preempted,
        ClientGone,
        InternalError,
        PoisonRequest,
    )
}


def from_code(code: str, message: str, param: str | None = None) -> RequestError:
    """Rebuild the error that a node reported; a code from a newer node becomes `InternalError`."""
    return BY_CODE.get(code, InternalError)(message, param=param)
