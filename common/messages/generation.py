"""A generation request as router, prefill node and decode node represent it."""

from __future__ import annotations

from typing import Annotated

import msgspec

GREEDY_EPSILON = 1e-5  # temperatures below this are greedy, as in vLLM
MAX_BIASES = 1024  # tokens per logit bias: rows of a fixed width on the device
MAX_STOP_IDS = 256  # stop tokens of a request, including the model's own

# The range of a tensor; larger values are refused at the socket.
Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
TokenIds = list[Int64]
TokenBias = tuple[Int64, float]  # token id, value added to its logit
TokenBiases = Annotated[tuple[TokenBias, ...], msgspec.Meta(max_length=MAX_BIASES)]
MAX_SALT_BYTES = 32
# See PageSpace.lease; b"" is shared by all requests without a salt.
CacheSalt = Annotated[bytes, msgspec.Meta(max_length=MAX_SALT_BYTES)]
StopTokens = Annotated[tuple[Int64, ...], msgspec.Meta(max_length=MAX_STOP_IDS)]
# Among requests that wait, lower values go first.
MAX_PRIORITY = 20
Priority = Annotated[int, msgspec.Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)]
TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Logprob = Annotated[float, msgspec.Meta(le=0.01)]  # rounding may make it slightly positive; NaN is refused
MAX_GRAMMAR = 1 << 17  # characters
Grammar = Annotated[str, msgspec.Meta(max_length=MAX_GRAMMAR)]
TopTokens = msgspec.Meta(max_length=32)
MAX_LOGPROB_IDS = 128  # tokens that a request may name to get their log-probabilities
LogprobIds = msgspec.Meta(max_length=MAX_LOGPROB_IDS)
Count = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]


class ImageSpan(msgspec.Struct, frozen=True, array_like=True):
    """The place of an image in a prompt: `length` placeholders from `offset` on. Its bytes are sent separately."""

    offset: Annotated[int, msgspec.Meta(ge=0)]
    length: Annotated[int, msgspec.Meta(ge=1)]
    digest: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]  # see salted_digest
    # Rows of equal length that its placeholders form, top to bottom.
    rows: Annotated[int, msgspec.Meta(ge=1)] = 1

    @property
    def columns(self) -> int:
        return self.length // self.rows

    @property
    def end(self) -> int:
        """The position after its last placeholder."""
        return self.offset + self.length

    def overlap(self, start: int, end: int) -> tuple[int, int]:
        """Return the part of prompt positions start .. end that it fills; empty unless the first is less."""
        return max(start, self.offset), min(end, self.end)


ImageSpans = Annotated[tuple[ImageSpan, ...], msgspec.Meta(max_length=256)]  # ascending, not overlapping


MAX_ALLOWED = 16_384  # token ids of allowed_token_ids
MAX_BAD_WORDS = 256
MAX_BAD_WORD = 64  # tokens
BadWord = Annotated[tuple[TokenId, ...], msgspec.Meta(min_length=1, max_length=MAX_BAD_WORD)]


MAX_MARKER = 64  # tokens
MarkerTokens = Annotated[tuple[TokenId, ...], msgspec.Meta(min_length=1, max_length=MAX_MARKER)]


class ThinkingLimit(msgspec.Struct, frozen=True, array_like=True):
    """The most tokens of reasoning at the beginning of an answer; `end` follows them, whatever the model prefers."""

    tokens: Count
    begin: MarkerTokens  # opens the reasoning
    end: MarkerTokens
    # None: the answer opens its reasoning itself, if it has any. n: the prompt does, and has n tokens of it.
    spent: Count | None = None


class TokenRules(msgspec.Struct, frozen=True, array_like=True):
    """Tokens that may be drawn, and sequences of them that may not."""

    allowed: Annotated[tuple[TokenId, ...], msgspec.Meta(max_length=MAX_ALLOWED)] = ()  # (): all
    # The last token of each is not drawn after the others.
    bad_words: Annotated[tuple[BadWord, ...], msgspec.Meta(max_length=MAX_BAD_WORDS)] = ()
    thinking: ThinkingLimit | None = None

    @property
    def tokens(self) -> tuple[int, ...]:
        """All tokens that it names."""
        markers = () if self.thinking is None else (*self.thinking.begin, *self.thinking.end)
        return (*self.allowed, *(token for word in self.bad_words for token in word), *markers)


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """The rules by which tokens are drawn and the text ends. The router validates them, both nodes apply them.

    The token at sequence index i is drawn with randomness keyed only by (seed, i), so the same seed gives the same
    text regardless of the rest of the batch, after retraction and on another node.

    A token's logit is changed in this order: divided (multiplied if negative) by repetition_penalty if the token is
    in the prompt or output; minus frequency_penalty times its count in the output; minus presence_penalty if that
    count is not 0; plus its logit_bias; minus infinity if it would end the text before min_tokens, or if the grammar or
    the token rules forbid it. Greedy requests take the largest. The others divide by the temperature, drop the tokens
    excluded by min_p, keep the top_k, then the top_p of the rest.
    """

    max_tokens: int  # output tokens in total, including the first; >= 1
    temperature: float = 1.0  # < GREEDY_EPSILON: argmax
    top_p: float = 1.0  # (0, 1]
    top_k: Count = 0  # 0: off
    seed: Int64 = 0  # 63 bits; the router draws one if the client gave none
    min_p: float = 0.0  # [0, 1]: tokens less likely than min_p times the likeliest are not drawn; 0: off
    repetition_penalty: float = 1.0  # at least 0.01; 1: off
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: TokenBiases = ()  # each id once
    min_tokens: Count = 0  # output tokens before any of stop_token_ids
    stop_token_ids: StopTokens = ()  # eos ids included unless ignore_eos
    # None: none; n: of the prompt's tokens and the n likeliest ones in their places. The prompt is then computed whole.
    prompt_logprobs: Annotated[int, msgspec.Meta(ge=0, le=32)] | None = None
    # None: none; n: the nodes send the hidden states of the positions n, n + 1, ... to the router.
    hidden_states_from: Count | None = None
    logprobs: int | None = None  # None: none; n: for the drawn token and the n likeliest ones (n may be 0)
    # Tokens whose log-probabilities come with each drawn token, and with each of the prompt that is scored; only with
    # `logprobs`.
    logprob_ids: Annotated[tuple[TokenId, ...], LogprobIds] = ()
    # What the answer must match, as `LLMatcher.grammar_from_*` of llguidance return it; "": anything.
    grammar: Grammar = ""
    token_rules: TokenRules | None = None

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_EPSILON

    @property
    def filtered(self) -> bool:
        """True if some tokens can never be drawn."""
        return not self.greedy and (self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0)

    @property
    def penalised(self) -> bool:
        """True if logits depend on the text so far."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def withheld(self) -> tuple[int, ...]:
        """Tokens that must not be drawn before there are min_tokens."""
        return self.stop_token_ids if self.min_tokens else ()

    def fits(self, vocab_size: int) -> bool:
        """Return whether every token that is used as an index on the device is in the vocabulary."""
        rules = () if self.token_rules is None else self.token_rules.tokens
        named = (*self.withheld, *(token for token, _ in self.logit_bias), *self.logprob_ids, *rules)
        return not named or (min(named) >= 0 and max(named) < vocab_size)


def context_tokens(prompt: int, max_tokens: int) -> int:
    """Return how much of the context a request takes that has `prompt` tokens and draws up to `max_tokens` more.

    A single token takes none: no node computes with it, because the answer ends on the prefill node.
    """
    return prompt if max_tokens == 1 else prompt + max_tokens


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Natural-log probabilities under the raw logits (before temperature and filters), as in vLLM."""

    logprob: Logprob
    top_ids: Annotated[tuple[TokenId, ...], TopTokens] = ()
    top_logprobs: Annotated[tuple[Logprob, ...], TopTokens] = ()
    chosen: Annotated[tuple[Logprob, ...], LogprobIds] = ()  # of the request's `logprob_ids`, in that order


class PromptLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Natural-log probabilities of a prompt token under the raw logits, given the tokens that precede it."""

    logprob: Logprob
    rank: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]  # 1 for the likeliest token
    top_ids: Annotated[tuple[TokenId, ...], TopTokens] = ()
    top_logprobs: Annotated[tuple[Logprob, ...], TopTokens] = ()
    chosen: Annotated[tuple[Logprob, ...], LogprobIds] = ()  # as in TokenLogprob


class OutputToken(msgspec.Struct, frozen=True, array_like=True):
    """One emitted token."""

    id: TokenId
    logprob: TokenLogprob | None = None


FINISH_STOP = "stop"
FINISH_LENGTH = "length"
