"""Passes the messages of nodes about requests to the attempts that they belong to.

A node may speak only of attempts that it takes part in. Messages about attempts that have ended, or belong to another
node, are dropped: they cross aborts and retries.
"""

from __future__ import annotations

from collections.abc import Sequence

from common.errors import NodeLost, RequestError, TransferFailed, from_code
from common.messages.router_inbox import Failed, FirstToken, HiddenStates, PrefillDone, PromptScores, TokenRun
from router.dispatch.dispatcher import Dispatcher
from router.nodes.registration import RegistrationRules


class AttemptMessages:
    """Each method takes the incarnation of the sender. Raises ProtocolError for a token outside the vocabulary."""

    def __init__(self, dispatcher: Dispatcher, rules: RegistrationRules) -> None:
        self._dispatcher = dispatcher
        self._rules = rules

    def on_runs(self, sender: str, runs: Sequence[TokenRun]) -> None:
        """Take tokens of a decode node, for as many attempts as there are runs."""
        for run in runs:
            attempt = self._dispatcher.attempt(run.room)
            if attempt is None or attempt.decode.incarnation != sender:
                continue
            self._rules.check_tokens(run.tokens)
            if run.finish_reason is not None:
                attempt.decode_over = True
            if run.stages is not None:
                self._dispatcher.timelines.anchor(run.room, sender, run.stages)
                tokens = run.offset + len(run.tokens)
                self._dispatcher.feedback.decoded(attempt, run.stages, tokens, run.accept_length)
            attempt.on_run(run)

    def on_first_token(self, sender: str, message: FirstToken) -> None:
        attempt = self._dispatcher.attempt(message.room)
        if attempt is None or attempt.prefill.incarnation != sender:
            return
        self._rules.check_tokens([message.token])
        attempt.prefill.rooms.computed(message.room)
        attempt.prefill_over = attempt.prefill_over or message.finish_reason is not None
        if message.stages is not None:
            self._dispatcher.timelines.anchor(message.room, sender, message.stages)
        attempt.on_first_token(message)

    def on_prompt_scores(self, sender: str, message: PromptScores) -> None:
        attempt = self._dispatcher.attempt(message.room)
        if attempt is None or attempt.prefill.incarnation != sender:
            return
        self._rules.check_scores(message.tokens)
        # The prompt bounds how many there are; after the first token the room counts none.
        if message.start + len(message.tokens) <= attempt.prefill.rooms.left(message.room):
            attempt.on_prompt_scores(message)

    def on_states(self, sender: str, message: HiddenStates) -> None:
        attempt = self._dispatcher.attempt(message.room)
        if attempt is not None:
            attempt.on_states(message, sender)

    def on_prefill_done(self, sender: str, message: PrefillDone) -> None:
        attempt = self._dispatcher.attempt(message.room)
        if attempt is not None and attempt.prefill.incarnation == sender:
            attempt.prefill_over = True
            attempt.prefill.rooms.remove(message.room)
            self._dispatcher.transferred(attempt, message.stages)
        # Also after the last token: timelines of ended requests get the stages of the node.
        self._dispatcher.timelines.anchor(message.room, sender, message.stages)

    def on_failed(self, sender: str, message: Failed) -> None:
        attempt = self._dispatcher.attempt(message.room)
        if attempt is None or sender not in (attempt.prefill.incarnation, attempt.decode.incarnation):
            return
        error: RequestError = from_code(message.code, message.message, message.param)
        node = attempt.prefill if attempt.prefill.incarnation == sender else attempt.decode
        attempt.blamed.add(sender)
        # Either end of a pair may be the cause.
        if isinstance(error, TransferFailed | NodeLost):
            attempt.blamed |= {attempt.prefill.incarnation, attempt.decode.incarnation}
        if node is attempt.prefill:
            attempt.prefill_over = True
            attempt.prefill.rooms.remove(message.room)
        else:
            attempt.decode_over = True
        self._dispatcher.failed(attempt, node, error)
