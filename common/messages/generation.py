"""What a generation request is, in the words that router, prefill node and decode node share."""

from __future__ import annotations

from typing import Annotated

import msgspec

GREEDY_EPSILON = 1e-5  # temperatures below this are greedy, as in vLLM
MAX_BIASES = 1024  # tokens that a logit bias may name: rows of a fixed width on the device
MAX_STOP_IDS = 256  # stop tokens of a request, the model's own included

Int64 = Annotated[
    int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)
]  # what a tensor can hold; refused at the socket
TokenIds = list[Int64]
TokenBias = tuple[Int64, float]  # added to this token's logit
TokenBiases = Annotated[tuple[TokenBias, ...], msgspec.Meta(max_length=MAX_BIASES)]
MAX_SALT_BYTES = 32
CacheSalt = Annotated[
    bytes, msgspec.Meta(max_length=MAX_SALT_BYTES)
]  # see PageSpace.lease; b"": shared by all
StopTokens = Annotated[tuple[Int64, ...], msgspec.Meta(max_length=MAX_STOP_IDS)]
TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Logprob = Annotated[float, msgspec.Meta(le=0.01)]  # rounding may make it a little more than 0; NaN is refused
TopTokens = msgspec.Meta(max_length=32)
Count = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]


class ImageSpan(msgspec.Struct, frozen=True, array_like=True):
    """Where an image stands in a prompt: `length` placeholders from `offset` on. Its bytes travel apart."""

    offset: Annotated[int, msgspec.Meta(ge=0)]
    length: Annotated[int, msgspec.Meta(ge=1)]
    digest: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]  # see salted_digest
    rows: Annotated[int, msgspec.Meta(ge=1)] = (
        1  # of equal length, in which its placeholders lie, top to bottom
    )

    @property
    def columns(self) -> int:
        return self.length // self.rows


ImageSpans = Annotated[tuple[ImageSpan, ...], msgspec.Meta(max_length=256)]  # ascending, apart


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are drawn and when to stop; validated by the router, obeyed by both nodes.

    The token at sequence index i is drawn with randomness keyed by (seed, i) alone, so the same seed gives the same
    text whatever else is in the batch, after retraction and on another node.

    A token's logit becomes, in this order: divided (multiplied if negative) by repetition_penalty if the token stands
    in prompt or output; less frequency_penalty times its count in the output; less presence_penalty if that count is
    not 0; plus its logit_bias; minus infinity if it would end the text before min_tokens. Greedy requests take the
    largest. The others divide by the temperature, drop what min_p drops, keep the top_k, then the top_p of the rest.
    """

    max_tokens: int  # output tokens in total, the first one included; >= 1
    temperature: float = 1.0  # < GREEDY_EPSILON: argmax
    top_p: float = 1.0  # (0, 1]
    top_k: Count = 0  # 0: off
    seed: Int64 = 0  # 63 bit; the router draws one where the client gave none
    min_p: float = 0.0  # [0, 1]: tokens less likely than min_p times the likeliest are not drawn; 0: off
    repetition_penalty: float = 1.0  # at least 0.01; 1: off
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: TokenBiases = ()  # each id once
    min_tokens: Count = 0  # output tokens before any of stop_token_ids
    stop_token_ids: StopTokens = ()  # eos ids included unless ignore_eos
    logprobs: int | None = None  # None: none; n: the drawn token's and the n likeliest tokens' (n may be 0)

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_EPSILON

    @property
    def filtered(self) -> bool:
        """Some tokens are never drawn."""
        return not self.greedy and (self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0)

    @property
    def penalised(self) -> bool:
        """Logits depend on the text so far."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def withheld(self) -> tuple[int, ...]:
        """Tokens that must not come before there are min_tokens."""
        return self.stop_token_ids if self.min_tokens else ()

    def fits(self, vocab_size: int) -> bool:
        """Every token that is an index on the device is in the vocabulary."""
        named = (*self.withheld, *(token for token, _ in self.logit_bias))
        return all(0 <= token < vocab_size for token in named)


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Natural-log probabilities under the raw logits (before temperature and filters), as vLLM reports them."""

    logprob: Logprob
    top_ids: Annotated[tuple[TokenId, ...], TopTokens] = ()
    top_logprobs: Annotated[tuple[Logprob, ...], TopTokens] = ()


class OutputToken(msgspec.Struct, frozen=True, array_like=True):
    """One emitted token."""

    id: TokenId
    logprob: TokenLogprob | None = None


FINISH_STOP = "stop"
FINISH_LENGTH = "length"
