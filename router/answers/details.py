"""Adds details that clients of vLLM and SGLang ask for: token ids, `prompt_logprobs` and hidden states.

With `return_token_ids` every choice, complete or in a chunk, has its `token_ids`. The ids of the prompt are
`prompt_token_ids`: in the answer and its first chunks for a chat, in each choice and its first chunk for a completion.
With `return_prompt_text` a chat has its `prompt_text` there, too.
`prompt_logprobs` belong to the answer of a chat and to each choice of a completion. `hidden_states` of a choice are, as
in SGLang, those that its last token was drawn from; a stream sends them in an event after the last one of the choice.
What other requests send does not pass through this module.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from router.answers.answer_form import AnswerForm
from router.answers.openai_responses import LOWEST_LOGPROB, AnswerPiece, Format, Usage
from router.answers.prompt_pieces import PromptPiece
from router.answers.whole_answers import Members, WholeAnswer, WholeChoice
from router.dispatch.answer_states import AnswerStates
from router.requests.openai_schema import ChatRequest, CompletionRequest, SharedFields
from router.tokens.names import TokenNames
from router.tokens.tokenizer import Tokenizer

_encode = msgspec.json.Encoder().encode
_PREFIX, _END = b"data: ", b"\n\n"


def with_details(
    shown: AnswerForm,
    form: Format,
    body: SharedFields,
    prompts: Sequence[Sequence[int]],
    tokenizer: Tokenizer,
) -> AnswerForm:
    """Return `shown` with the details that a request asks for; `prompts` are the ids of each choice's prompt."""
    told = _prompt_members(body, prompts[0], tokenizer) if isinstance(body, ChatRequest) else {}
    if body.native or not (
        told or body.return_token_ids or body.prompt_logprobs is not None or body.return_hidden_states
    ):
        return shown
    return FormWithDetails(shown, form, body, prompts, told, tokenizer)


def _prompt_members(body: ChatRequest, prompt: Sequence[int], tokenizer: Tokenizer) -> dict[str, Any]:
    """Return what the answer to a chat tells of its prompt."""
    told: dict[str, Any] = {}
    if body.return_token_ids:
        told["prompt_token_ids"] = list(prompt)
    if body.return_prompt_text:
        told["prompt_text"] = tokenizer.decode(prompt, skip_special_tokens=False)
    return told


class FormWithDetails:
    """Adds details to the answers of OpenAI's API. Log-probabilities of prompts are not streamed."""

    def __init__(
        self,
        shown: AnswerForm,
        form: Format,
        body: SharedFields,
        prompts: Sequence[Sequence[int]],
        told: Mapping[str, Any],
        names: TokenNames,
    ) -> None:
        """`shown` makes the events to extend, `form` the complete answer.

        Args:
            told: members of the answer and of each choice's first event.
            names: names prompt tokens.
        """
        self._shown = shown
        self._form = form
        self._body = body
        self._prompts = prompts
        self._told = told
        self._names = names
        self._chat = not isinstance(body, CompletionRequest)
        self._waiting: dict[int, list[int]] = {}  # choice -> ids of tokens whose event is still to come
        self._begun: set[int] = set()  # choices whose prompt ids were sent
        self._tokens: Counter[int] = Counter()  # choice -> its tokens so far

    def opening(self, choices: int, usage: bytes) -> bytes:
        sent = self._shown.opening(choices, usage)
        if not self._told:
            return sent
        # One event of each choice comes first; others may follow.
        events = _events(sent)
        first = [{**event, **self._told} for event in events[:choices]]
        return b"".join(map(_event, [*first, *events[choices:]]))

    def events(self, piece: AnswerPiece, usage: bytes) -> bytes:
        """Return the events of a piece. Each token's id is in the first event of its choice from its piece on."""
        sent = self._shown.events(piece, usage)
        if not isinstance(piece, PromptPiece):
            self._tokens[piece.index] += len(piece.tokens)
        made = self._with_ids(piece, sent) if self._body.return_token_ids else sent
        if piece.finish_reason is None or piece.states is None:
            return made
        return made + self._last_state(piece, piece.states, _events(sent)[-1])

    def _last_state(self, piece: AnswerPiece, states: AnswerStates, last: dict[str, Any]) -> bytes:
        """Return the event with a choice's hidden states. `last`: its event before."""
        found = states.last(self._tokens[piece.index])
        shown: dict[str, Any] = {
            "text": "",
            "hidden_states": found,
            "stop_reason": None,
            "matched_stop": None,
        }
        if self._chat:
            shown = {"delta": {"hidden_states": found}}
        choice = {"index": piece.index, **shown, "logprobs": None, "finish_reason": None}
        return _event({**last, "choices": [choice]})

    def _with_ids(self, piece: AnswerPiece, sent: bytes) -> bytes:
        waiting = self._waiting.setdefault(piece.index, [])
        if not isinstance(piece, PromptPiece):
            waiting += [token.id for token in piece.tokens]
        made = b""
        for event in _events(sent):
            for choice in event["choices"]:
                choice["token_ids"] = list(waiting)
                waiting.clear()
                if not self._chat and piece.index not in self._begun:
                    self._begun.add(piece.index)
                    choice["prompt_token_ids"] = list(self._prompts[piece.index])
            made += _event(event)
        return made

    def ending(self, usage: Usage, with_usage: bool) -> Iterable[bytes]:
        return self._shown.ending(usage, with_usage)

    def failure(self, body: dict[str, Any], status: int) -> bytes:
        return self._shown.failure(body, status)

    def collector(self, choices: int) -> WholeAnswer:
        body, scores = self._body, list[PromptScoreList]()
        if body.prompt_logprobs is not None:
            scores = [PromptScoreList(ids, body.prompt_logprobs, self._names) for ids in self._prompts]
        whole = []
        for index, prompt in enumerate(self._prompts):
            further: list[Members] = []
            if body.return_token_ids:
                further.append(TokenIds(None if self._chat else prompt))
            if body.return_hidden_states:
                further.append(LastState())
            if scores and not self._chat:
                further.append(scores[index])
            whole.append(WholeChoice(self._form, index, further))
        first = _encode(self._told)[1:-1] + b"," if self._told else b""
        return WholeAnswer(self._form, whole, first, scores[0] if scores and self._chat else None)


class TokenIds:
    """The members `token_ids` and, in a choice of a completion, `prompt_token_ids`."""

    def __init__(self, prompt: Sequence[int] | None) -> None:
        """`prompt`: ids to list in the choice; None for a chat, whose answer lists them once."""
        self._prompt = prompt
        self._ids: list[int] = []

    def add(self, piece: AnswerPiece) -> None:
        if not isinstance(piece, PromptPiece):
            self._ids += [token.id for token in piece.tokens]

    def parts(self) -> list[bytes]:
        members = [b',"token_ids":', _encode(self._ids)]
        if self._prompt is not None:
            members += [b',"prompt_token_ids":', _encode(list(self._prompt))]
        return members


class LastState:
    """The member `hidden_states`: the state that the last token of a choice was drawn from."""

    def __init__(self) -> None:
        self._tokens = 0
        self._states: AnswerStates | None = None

    def add(self, piece: AnswerPiece) -> None:
        if not isinstance(piece, PromptPiece):
            self._tokens += len(piece.tokens)
            self._states = piece.states

    def parts(self) -> list[bytes]:
        found = None if self._states is None else self._states.last(self._tokens)
        return [b',"hidden_states":', _encode(found)]


class PromptScoreList:
    """The member `prompt_logprobs`: null for the first token, then id -> log-probability of each and the likeliest."""

    def __init__(self, ids: Sequence[int], top: int, names: TokenNames) -> None:
        self._ids = ids
        self._top = top
        self._names = names
        self._parts = [b"null"]

    def add(self, piece: AnswerPiece) -> None:
        for score in piece.prompt_logprobs:
            token = self._ids[len(self._parts)]
            pairs = list(zip(score.top_ids, score.top_logprobs))[: self._top]
            entries = {each: self._entry(each, value, rank) for rank, (each, value) in enumerate(pairs, 1)}
            entries.setdefault(token, self._entry(token, score.logprob, score.rank))
            self._parts.append(_encode(entries))

    def parts(self) -> list[bytes]:
        return [b',"prompt_logprobs":[', b",".join(self._parts), b"]"]

    def _entry(self, token: int, logprob: float, rank: int) -> dict[str, Any]:
        shown = max(LOWEST_LOGPROB, logprob)
        return {"logprob": shown, "rank": rank, "decoded_token": self._names.token_text(token)}


def _events(sent: bytes) -> list[Any]:
    return [msgspec.json.decode(event[len(_PREFIX) :]) for event in sent.split(_END) if event]


def _event(event: Any) -> bytes:
    return _PREFIX + _encode(event) + _END
