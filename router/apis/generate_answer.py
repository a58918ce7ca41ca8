"""Answers of SGLang's /generate. A streamed event repeats the text so far, as SGLang's clients expect."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from common.errors import InvalidRequest
from common.messages.generation import FINISH_LENGTH, FINISH_STOP, OutputToken
from router.answers.answer_form import AnswerForm
from router.answers.openai_responses import LOWEST_LOGPROB, AnswerPiece, Usage
from router.answers.prompt_pieces import PromptPiece
from router.apis.generate_request import GenerateTask
from router.chat.answer_style import AnswerStyle
from router.chat.reasoning_counter import ReasoningCounter
from router.dispatch.answer_states import AnswerStates
from router.dispatch.generation import FINISH_ABORT
from router.http.json_answer import BodyPart
from router.http.sse import DONE
from router.tokens.tokenizer import Tokenizer

# An event is sent once a choice has grown by 1 / GROWTH since the last one: events repeat everything, so without this
# their total size would be quadratic in the length of the answer.
GROWTH = 64
_encode = msgspec.json.Encoder().encode


class _Scores:
    """Log-probabilities of consecutive tokens, as items of JSON lists."""

    def __init__(self) -> None:
        self.tokens: list[bytes] = []
        self.tops: list[bytes] = []  # per token: the likeliest in its place
        self.chosen: list[bytes] = []  # per token: those that the client names

    def add(self, token: bytes, tops: bytes, chosen: bytes) -> None:
        self.tokens.append(token)
        self.tops.append(tops)
        self.chosen.append(chosen)


class _Choice:
    """One choice so far."""

    def __init__(self, prompt_tokens: int, reasoning: ReasoningCounter | None) -> None:
        self.prompt_tokens = prompt_tokens
        self.reasoning = reasoning
        self.cached_tokens = 0
        self.text: list[str] = []
        self.ids = array("i")
        self.scores = _Scores()
        self.prompt_scores = _Scores()
        self.prompt_seen = 0  # tokens of the prompt in earlier pieces
        self.finish: dict[str, Any] | None = None
        self.end: dict[str, Any] = {}  # members of `meta_info` that its last event adds
        self.sent = 0  # tokens in the last event
        self.states: AnswerStates | None = None


class GenerateForm(AnswerForm):
    """An `AnswerForm`, and the collector of its own complete answers."""

    def __init__(
        self,
        task: GenerateTask,
        ids: Sequence[str],
        tokenizer: Tokenizer,
        prompts: Sequence[Sequence[int]],
        answers: AnswerStyle,
    ) -> None:
        """`ids` and `prompts`: of each choice."""
        prompt_tokens = [*map(len, prompts)]
        self._listed = task.listed
        self._logprobs = task.logprobs
        self._top = task.completion.logprobs or 0
        self._chosen = task.completion.logprob_token_ids or ()
        self._with_text = task.with_text
        self._start = task.start
        if task.start is not None and task.start > min(prompt_tokens):
            raise InvalidRequest(
                f"logprob_start_len is {task.start}; a prompt of the request has {min(prompt_tokens)} tokens",
                param="logprob_start_len",
            )
        self._ids = ids
        self._tokenizer = tokenizer
        self._choices = [
            _Choice(len(prompt), answers.reasoning_counter(prompt, tokenizer.symbols_of))
            for prompt in prompts
        ]
        self._late: list[int] = []  # choices whose last event has hidden states and is sent after all others
        self._clock = asyncio.get_running_loop().time
        self._started = self._clock()

    def events(self, piece: AnswerPiece, usage: bytes) -> bytes:
        choice = self._add(piece)
        if isinstance(piece, PromptPiece):
            return b""
        if choice.finish is None and (len(choice.ids) - choice.sent) * GROWTH < len(choice.ids):
            return b""
        choice.sent = len(choice.ids)
        if choice.states is not None:
            self._late.append(piece.index)
            return b""
        return b"".join((self._begin(piece.index), *self._parts(piece.index)[1:], b"\n\n"))

    def ending(self, usage: Usage, with_usage: bool) -> Iterator[bytes]:
        for index in self._late:
            _, *parts = self._whole(index)
            yield self._begin(index)
            for part in parts:
                yield from (bytes(part),) if isinstance(part, bytes | bytearray) else part
            yield b"\n\n"
        yield DONE

    def _begin(self, index: int) -> bytes:
        """Return the beginning of an event, with that of its JSON object."""
        return b'data: {"index":%d,"text":' % index if self._listed else b'data: {"text":'

    def collector(self, choices: int) -> GenerateForm:
        return self

    def add(self, piece: AnswerPiece) -> None:
        self._add(piece)

    async def parts(self, usage: Usage) -> list[BodyPart]:
        if not self._listed:
            return self._whole(0)
        parts: list[BodyPart] = []
        for index in range(len(self._choices)):
            parts += [b"," if parts else b"[", *self._whole(index)]
            await asyncio.sleep(0)  # long texts are encoded in turns of their own
        return [*parts, b"]"]

    def _whole(self, index: int) -> list[BodyPart]:
        """Return the JSON object of a choice that has finished, with its hidden states."""
        choice, parts = self._choices[index], self._parts(index)
        if choice.states is None:
            return [*parts]
        return [*parts[:-1], b',"hidden_states":', choice.states.encoded(len(choice.ids)), parts[-1]]

    def _add(self, piece: AnswerPiece) -> _Choice:
        choice = self._choices[piece.index]
        if isinstance(piece, PromptPiece):
            self._add_prompt(choice, piece.tokens)
            return choice
        choice.cached_tokens += piece.cached_tokens or 0
        if piece.text:
            choice.text.append(piece.text)
        choice.ids.extend(token.id for token in piece.tokens)
        if choice.reasoning is not None:
            for token in piece.tokens:
                choice.reasoning.add(token.id)
        if self._logprobs:
            for token in piece.tokens:
                self._add_scores(choice.scores, token)
        if piece.finish_reason is not None:
            self._finish(choice, piece)
        return choice

    def _finish(self, choice: _Choice, piece: AnswerPiece) -> None:
        """Take from the last piece of a choice how it ended."""
        aborted = piece.finish_reason == FINISH_ABORT and not choice.ids
        choice.states = None if aborted else piece.states
        choice.finish = _finish_reason(piece, choice)
        choice.end["e2e_latency"] = round(self._clock() - self._started, 6)
        if piece.steps is not None and piece.steps.accept_length is not None:
            choice.end["spec_verify_ct"] = piece.steps.count
            choice.end["spec_accept_length"] = round(piece.steps.accept_length, 6)

    def _add_prompt(self, choice: _Choice, tokens: Sequence[OutputToken]) -> None:
        """Add tokens of the prompt. As in SGLang, the first one that is listed has no log-probability."""
        for token in tokens:
            place = choice.prompt_seen
            choice.prompt_seen += 1
            if self._start is None or place < self._start:
                continue
            if place == self._start:
                choice.prompt_scores.add(_encode((None, token.id, self._text_of(token.id))), b"null", b"null")
            else:
                self._add_scores(choice.prompt_scores, token)

    def _add_scores(self, scores: _Scores, token: OutputToken) -> None:
        found = token.logprob
        if found is None:
            return
        tops = [self._entry(value, each) for each, value in zip(found.top_ids, found.top_logprobs)]
        chosen = [self._entry(value, each) for each, value in zip(self._chosen, found.chosen, strict=True)]
        scores.add(
            _encode(self._entry(found.logprob, token.id)),
            _encode(tops[: self._top] if self._top else None),
            _encode(chosen),
        )

    def _entry(self, logprob: float, token: int) -> tuple[float, int, str | None]:
        return max(LOWEST_LOGPROB, logprob), token, self._text_of(token)

    def _text_of(self, token: int) -> str | None:
        return self._tokenizer.token_text(token) if self._with_text else None

    def _parts(self, index: int) -> list[bytes]:
        """Return the JSON object of a choice, in parts."""
        choice = self._choices[index]
        meta: dict[str, Any] = {
            "id": self._ids[index],
            "finish_reason": choice.finish,
            "prompt_tokens": choice.prompt_tokens,
            "completion_tokens": len(choice.ids),
            "reasoning_tokens": 0 if choice.reasoning is None else choice.reasoning.count,
            "cached_tokens": choice.cached_tokens,
            "weight_version": "default",
            **choice.end,
        }
        parts = [
            b'{"text":',
            _encode("".join(choice.text)),
            b',"output_ids":',
            _encode(choice.ids.tolist()),
            b',"meta_info":',
            _encode(meta)[:-1],
        ]
        if self._logprobs:
            # Events repeat what came before, so those of the prompt wait for the last one.
            prompt = choice.prompt_scores if choice.finish is not None else _Scores()
            for side, scores in (b"input", prompt), (b"output", choice.scores):
                parts += _list(side + b"_token_logprobs", scores.tokens)
                parts += _list(side + b"_top_logprobs", scores.tops)
                if self._chosen:
                    parts += _list(side + b"_token_ids_logprobs", scores.chosen)
            parts.append(b',"output_token_logprobs_length":%d' % len(choice.scores.tokens))
        return [*parts, b"}}"]


def _list(name: bytes, items: Sequence[bytes]) -> tuple[bytes, ...]:
    """Return a member of a JSON object that is a list of `items`."""
    return b',"%b":[' % name, b",".join(items), b"]"


def _finish_reason(piece: AnswerPiece, choice: _Choice) -> dict[str, Any]:
    if piece.finish_reason == FINISH_STOP:
        return {"type": FINISH_STOP, "matched": piece.matched_stop}
    if piece.finish_reason == FINISH_LENGTH:
        return {"type": FINISH_LENGTH, "length": len(choice.ids)}
    return {"type": piece.finish_reason, "message": "the client aborted the request"}
