"""Training windows: conversations as token ids with loss weights. Imports no torch, like `corpus`."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

from tokenizers import Tokenizer

from deploy.tiny_models.corpus import Document, Windows, packed
from deploy.tiny_models.tokenizer import id_of
from deploy.tiny_models.tool_calls.chat_form import NONE, PAD, WHOLE, Segment, Turns, segments
from deploy.tiny_models.tool_calls.conversations import KINDS, TRAINED, Conversations

AT_ONCE = 128  # documents that are encoded together
# window lengths and the shares of batches that have them
WINDOWS = (1024, 2048, 4096)
WINDOW_SHARES = (0.7, 0.2, 0.1)
EARLIER = (0, 1, 2, 4)  # exchanges before the last one
EARLIER_SHARES = (0.7, 0.15, 0.1, 0.05)
# A thought that is left out of the second turn, as most clients do it, and thinking turned off are taught separately.
TURNS = (
    WHOLE,
    Turns(thinks=True, first=False, second=True, keeps=False),
    Turns(thinks=False, first=True, second=False, keeps=False),
    Turns(thinks=False, first=False, second=True, keeps=False),
)
TURN_SHARES = (0.45, 0.15, 0.25, 0.15)
SINGLY_SHARE = 0.1  # share of parallel calls
WITHOUT_TOOLS_SHARE = 0.05  # share of second turns: clients leave the tools out when they want an answer


class ConversationSource:
    """Yields endless training documents for one seed; all questions are from the training split."""

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self._rng = random.Random(f"documents/{seed}")
        self._tokenizer = tokenizer
        self._conversations = Conversations(seed, "train")
        self._documents = self._encoded()
        self._pad = id_of(tokenizer, PAD)

    def document(self) -> Document:
        """Return the next document."""
        return next(self._documents)

    def batches(self, batch_tokens: int) -> Iterator[Windows]:
        """Yield endless batches of about `batch_tokens` tokens, one window length each."""
        while True:
            (window,) = self._rng.choices(WINDOWS, WINDOW_SHARES)
            yield packed(self.document, window, max(1, batch_tokens // window))

    def _segments(self) -> list[Segment]:
        conversation = self._conversations.draw(KINDS, TRAINED)
        (earlier,) = self._rng.choices(EARLIER, EARLIER_SHARES)
        (turns,) = self._rng.choices(TURNS, TURN_SHARES)
        conversation = self._conversations.after(conversation, earlier)
        if len(conversation.exchange.calls) > 1 and self._rng.random() < SINGLY_SHARE:
            turns = replace(turns, singly=True)
        elif not turns.first and self._rng.random() < WITHOUT_TOOLS_SHARE:
            conversation = replace(conversation, tools=())
        return list(segments(conversation, turns))

    def _encoded(self) -> Iterator[Document]:
        while True:
            documents = [self._segments() for _ in range(AT_ONCE)]
            texts = [text for each in documents for text, _ in each]
            encoded = iter(self._tokenizer.encode_batch_fast(texts, add_special_tokens=False))
            for each in documents:
                ids: list[int] = []
                weights: list[int] = []
                for _, weight in each:
                    piece = next(encoded).ids
                    ids += piece
                    weights += [weight] * len(piece)
                yield [*ids, self._pad], [*weights, NONE]
