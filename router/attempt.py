"""One attempt of one request: a room on two nodes, and the two token streams merged by offset."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from common.errors import DeadlineExceeded, InternalError, NodeLost, RequestError
from common.messages.generation import OutputToken
from common.messages.router_inbox import FirstToken, TokenRun
from router.node_registry import Node

MAX_EARLY_RUNS = 4096  # decode steps that may overtake the first token
MAX_TAKEN = 128  # tokens that go to the client in one turn of the loop: with log-probabilities 27 us each


@dataclass(slots=True, eq=False)
class Attempt:
    """Filled by the control plane, emptied by the dispatcher; both on the event loop."""

    room: int
    prefill: Node
    decode: Node
    emitted: int = 0  # tokens that the request had said before
    next_offset: int = 0
    pending: list[OutputToken] = field(default_factory=list)  # in order, not given to the client yet
    # offset -> run that waits for the ones before it
    early: dict[int, TokenRun] = field(default_factory=dict)
    finish_reason: str | None = None
    error: RequestError | None = None
    cached_tokens: int = 0
    prefill_over: bool = False  # pages handed over, or the leg failed: nothing to abort there
    decode_over: bool = False
    transferred: bool = False  # the prefill node has handed the pages over
    blamed: set[str] = field(default_factory=set)  # incarnations that another attempt should avoid
    woken: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def said(self) -> int:
        """Tokens of the request in all, those that the client has not got yet included."""
        return self.emitted + self.next_offset

    def on_first_token(self, message: FirstToken) -> None:
        self.cached_tokens = message.cached_tokens
        self.on_run(TokenRun(self.room, 0, [message.token], message.finish_reason))

    def on_run(self, run: TokenRun) -> None:
        """Take tokens in from either node; duplicates are dropped, what comes early waits."""
        if self.finish_reason is not None:
            return
        if run.offset > self.next_offset:
            if len(self.early) >= MAX_EARLY_RUNS:
                self.fail(InternalError("a decode node is far ahead of the prefill node"))
            else:
                self.early[run.offset] = run
            return
        self._append(run)
        if self.early:
            for offset in sorted(self.early):
                if self.finish_reason is not None or offset > self.next_offset:
                    break
                self._append(self.early.pop(offset))
        self.woken.set()

    def fail(self, error: RequestError) -> None:
        """The first failure counts."""
        if self.error is None and self.finish_reason is None:
            self.error = error
        self.woken.set()

    def lose(self, node: Node, reason: str) -> None:
        """A node of this attempt is gone."""
        if node is self.prefill:
            self.prefill_over = True
        else:
            self.decode_over = True
        self.fail(NodeLost(f"{node.role} node {node.name} was lost: {reason}"))

    def expire(self) -> None:
        """The request's deadline is over. One timer per attempt: one for every token would cost more than the token."""
        self.fail(DeadlineExceeded("the request took longer than its timeout"))

    def take(self) -> list[OutputToken]:
        """What has come since the last call, of much the first part: the rest stays `pending`."""
        tokens, self.pending = self.pending[:MAX_TAKEN], self.pending[MAX_TAKEN:]
        if not self.pending:
            self.woken.clear()
        return tokens

    def _append(self, run: TokenRun) -> None:
        fresh = run.tokens[self.next_offset - run.offset :]
        self.pending.extend(fresh)
        self.next_offset += len(fresh)
        if run.finish_reason is not None:
            self.finish_reason = run.finish_reason
