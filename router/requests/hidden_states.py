"""Decides which requests get hidden states, and limits the memory that those of all answers take."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from common.errors import InvalidRequest, Overloaded
from router.dispatch.answer_states import VALUE_BYTES, AnswerStates
from router.requests.openai_schema import SharedFields

FIELD = "return_hidden_states"
# Bytes of all answers in progress. Nodes never have more of them on their way to the router.
MAX_HELD = 256 << 20
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class StateLimit:
    """The size of a hidden state, and the maximum bytes of one answer's states in float32."""

    hidden_size: int
    max_bytes: int


def answer_states(
    body: SharedFields, limit: StateLimit | None, prompt_tokens: int, max_tokens: int
) -> AnswerStates | None:
    """Return what collects the hidden states of an answer; None if the client asks for none. Raises InvalidRequest.

    SGLang's own route shows those of all positions, the other routes that of the last one.
    """
    if not body.return_hidden_states:
        return None
    if limit is None:
        raise InvalidRequest(
            "return_hidden_states is not allowed here; the cluster file would have to set "
            "model.return_hidden_states: true",
            param=FIELD,
        )
    first = 0 if body.native else prompt_tokens - 1
    positions, row = prompt_tokens + max_tokens - 1 - first, VALUE_BYTES * limit.hidden_size
    if positions * row > limit.max_bytes:
        prompt = f"{prompt_tokens} tokens in the prompt and " if body.native else ""
        raise InvalidRequest(
            f"the hidden states of {prompt}{max_tokens} tokens of the answer may take {positions} * "
            f"{limit.hidden_size} * {VALUE_BYTES} = {positions * row} bytes; the limit is {limit.max_bytes} "
            "(model.hidden_states_mib): lower max_tokens or shorten the prompt",
            param=FIELD,
        )
    return AnswerStates(first, prompt_tokens, max_tokens, limit.hidden_size)


class StateMemory:
    """The memory for the hidden states of all answers in progress."""

    def __init__(self, most: int = MAX_HELD) -> None:
        self._most = most
        self.held = 0  # bytes

    @contextmanager
    def hold(self, answers: Sequence[AnswerStates]) -> Iterator[None]:
        """Reserve what the states of a request's answers may take. Raises Overloaded, or InvalidRequest if never."""
        size = sum(each.max_bytes for each in answers)
        if size > self._most:
            raise InvalidRequest(
                f"the hidden states of all answers of this request may take {size // _MIB} MiB; the limit is "
                f"{self._most // _MIB}: ask for fewer answers",
                param=FIELD,
            )
        if self.held + size > self._most:
            raise Overloaded("the hidden states of other answers take all memory for them; try again later")
        self.held += size
        try:
            yield
        finally:
            self.held -= size
