"""What a generation request is, in the words that router, prefill node and decode node share."""

from __future__ import annotations

from typing import Annotated

import msgspec

GREEDY_EPSILON = 1e-5  # temperatures below this are greedy, as in vLLM


Int64 = Annotated[
    int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)
]  # what a tensor can hold; refused at the socket
TokenIds = list[Int64]


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are drawn and when to stop; validated by the router, obeyed by both nodes.

    The token at sequence index i is drawn with randomness keyed by (seed, i) alone, so the same seed gives the same
    text whatever else is in the batch, after retraction and on another node.
    """

    max_tokens: int  # output tokens in total, the first one included; >= 1
    temperature: float = 1.0  # < GREEDY_EPSILON: argmax
    top_p: float = 1.0  # (0, 1]
    top_k: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] = 0  # 0: off
    seed: Int64 = 0  # 63 bit; the router draws one where the client gave none
    stop_token_ids: tuple[int, ...] = ()  # eos ids included unless ignore_eos
    logprobs: int | None = None  # None: none; n: the drawn token's and the n likeliest tokens' (n may be 0)

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_EPSILON


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Natural-log probabilities under the raw logits (before temperature and filters), as vLLM reports them."""

    logprob: float
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


class OutputToken(msgspec.Struct, frozen=True, array_like=True):
    """One emitted token."""

    id: int
    logprob: TokenLogprob | None = None


FINISH_STOP = "stop"
FINISH_LENGTH = "length"
