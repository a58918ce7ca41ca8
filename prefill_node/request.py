"""The state of one prompt on a prefill node."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from common.engine.state.draft_row import NO_DRAFT, DraftRow
from common.errors import RequestError
from common.grammar.token_rules import Follower, PendingFollower
from common.kv_cache.host_plan import HostCopy
from common.kv_cache.image_keys import with_images
from common.kv_cache.page_space import PageLease
from common.kv_cache.radix_cache import Keys
from common.messages.generation import ImageSpan, OutputToken, SamplingParams
from common.messages.prefill_inbox import Prefill
from common.node.finishing import follow_token
from common.node.to_router import NO_ROUTER, ToRouter
from kv_transfer.handoff_record import HandoffRecord, HiddenDtype


@dataclass(slots=True, eq=False)
class PrefillRequest:
    """A prompt. It is in exactly one queue at a time (see queues.py).

    Invariant: sent_pages * page_size <= max(min(scheduled - rewrites, keyed), cached tokens) and computed <= scheduled
    <= len(keys) until the last chunk. From the last chunk on, sent_pages may also count the last, partly filled page.
    Sent pages past `computed` are those that are sent layer by layer.
    """

    # As the router has sent it.
    room: int
    request_id: str
    keys: Keys  # [prompt tokens] int64: the token ids, in the form that the batch uses
    emitted: int  # number of output tokens at the end of keys
    sampling: SamplingParams
    decode: str  # incarnation of the decode node
    received: float  # monotonic seconds
    router: ToRouter = NO_ROUTER  # which sent it and gets its first token
    images: tuple[ImageSpan, ...] = ()  # their pixels stay with the worker
    waited: float = 0.0  # seconds before `received`, in the queues of nodes that gave it back
    priority: int = 0  # lower goes first
    salt: bytes = b""  # its pages in the prefix cache are found only with the same salt

    # Its grammar.
    compilation: PendingFollower | None = None  # until `matcher` and `mask` are set
    matcher: Follower | None = None  # has followed the answer so far
    mask: bytes = b""  # the tokens that may come first, one row of common.grammar.matcher.Masks; empty: all

    # Its pages: on this node, in host memory, and sent.
    lease: PageLease | None = None  # pages for the whole prompt, from admission to settlement
    keyed: int = 0  # tokens whose KV depends only on the prompt; a draft also reads later tokens
    rewrites: int = 0  # tokens before a chunk whose KV the chunk's forward may rewrite
    load: HostCopy | None = None  # what the plan of its first chunk copies from host memory
    loaded: int = 0  # tokens of the prefix that ends with what is copied from host memory; 0: nothing is
    storing: bool = False  # its pages are being copied to host memory
    granted: bool = False  # the decode node has reserved its pages
    sent_pages: int = 0  # logical pages passed to the sender, including those that the peer already holds
    recorded: bool = False  # its record was ordered to be sent

    # Its progress.
    launched_at: float = math.inf  # monotonic seconds of its latest chunk's launch
    scheduled: int = 0  # tokens whose forward has been launched, including the reused prefix
    computed: int = 0  # tokens whose KV is known to be written
    computed_by: int = 0  # generation of the plan that wrote the last of them; 0 for the prefix cache
    in_flight: int = 0  # unfinished launches; its pages must not be freed while there are any
    first_token: OutputToken | None = None
    draft: DraftRow = NO_DRAFT  # set with the first token if there is a draft model
    ended: bool = False  # aborted or failed: nothing more is launched
    settled: bool = False  # the sender no longer reads these pages
    stages: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        message: Prefill,
        keys: Keys,
        router: ToRouter,
        now: float,
        compilation: PendingFollower | None,
    ) -> PrefillRequest:
        """Return the prompt that `router` has sent. `keys`: its token ids."""
        return cls(
            room=message.room,
            request_id=message.request_id,
            keys=keys,
            emitted=message.emitted,
            sampling=message.sampling,
            decode=message.decode,
            received=now,
            waited=message.waited_ms / 1000,
            router=router,
            images=message.images,
            salt=message.salt,
            priority=message.priority,
            compilation=compilation,
        )

    @property
    def queued(self) -> float:
        """The time since which it counts as waiting."""
        return self.received - self.waited

    @property
    def num_tokens(self) -> int:
        return len(self.keys)

    @property
    def contents(self) -> Keys:
        """Return `keys` with images by their content, for the prefix cache.

        Raises InvalidRequest if spans do not fit.
        """
        return with_images(self.keys, self.images) if self.images else self.keys

    @property
    def max_cached(self) -> int:
        """Return how many tokens the prefix cache may supply: those whose hidden states nothing reads."""
        if self.sampling.prompt_logprobs is not None:
            return 0
        first = self.sampling.hidden_states_from
        return self.num_tokens - 1 if first is None else min(first, self.num_tokens - 1)

    @property
    def reused(self) -> int:
        """Tokens that are not computed for this prompt: those of the prefix cache, in device or host memory."""
        assert self.lease is not None
        return max(self.lease.cached_tokens, self.loaded)

    @property
    def remaining(self) -> int:
        return len(self.keys) - self.scheduled

    @property
    def releasable(self) -> bool:
        return self.in_flight == 0 and self.settled and not self.storing

    def follow(self, token: int) -> str | None:
        """Return the finish reason if the request ends with its first token, else None.

        If its matcher cannot go on, `failure` says why.
        """
        return follow_token(token, self.emitted + 1, self.sampling, self.matcher)

    @property
    def failure(self) -> RequestError | None:
        """The error because of which the matcher of its grammar cannot go on, which ends the request."""
        return None if self.matcher is None else self.matcher.failure

    def complete_pages(self, computed: int, page_size: int) -> int:
        """Return how many leading logical pages no later forward writes once `computed` tokens are computed.

        The sender may read them at any time from then on: a page that changes would not match its checksum.
        """
        assert self.lease is not None
        if computed == self.num_tokens:
            return len(self.lease.pages)
        return max(min(computed - self.rewrites, self.keyed), self.lease.cached_tokens) // page_size

    def take_pages(self, complete: int, held_pages: int) -> tuple[int, tuple[int, ...]]:
        """Return (first logical page, pages) of the complete pages that were neither sent nor held by the peer.

        Logical pages below `complete` are complete. The returned pages count as sent from here on.
        """
        assert self.lease is not None
        first = max(self.sent_pages, held_pages)
        self.sent_pages = max(self.sent_pages, complete)
        return first, tuple(self.lease.pages[first:complete])

    def record(self, hidden_dtype: HiddenDtype) -> HandoffRecord:
        """Return the record that ends the transfer. The first token must be drawn."""
        assert self.first_token is not None
        assert self.lease is not None
        return HandoffRecord(
            first_token=self.first_token.id,
            num_tokens=self.num_tokens,
            cached_tokens=self.reused,
            draft_topk_probs=self.draft.draft_topk_probs,
            draft_topk_ids=self.draft.draft_topk_ids,
            draft_hidden=self.draft.hidden,
            draft_hidden_dtype=hidden_dtype,
        )

    def mark(self, stage: str, now: float) -> None:
        self.stages.setdefault(stage, now - self.received)
