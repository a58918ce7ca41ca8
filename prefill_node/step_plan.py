"""Defines the plan of one turn of a prefill node's device, which is made without access to the device.

A plan is data: the planner makes it, `Worker.apply` carries it out, and nothing else changes device state. The plan
fully determines which graphs run, so every process that applies it chooses the same ones.
"""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from common.engine.sampling.sampling_plan import SamplingVariant
from common.kv_cache.host_plan import HostCopy, Store
from common.messages.generation import ImageSpan, SamplingParams

TokenArray = npt.NDArray[np.int64]


class FirstDraw(msgspec.Struct, frozen=True, kw_only=True):
    """The parameters by which the token after a prompt is drawn."""

    sampling: SamplingParams
    text: bytes = b""  # the whole prompt in int64; empty if no logits are adjusted
    outputs: int = 0  # tokens at the end of the prompt that are output
    # The tokens that its grammar allows: one row of common.grammar.matcher.Masks; empty allows all.
    mask: bytes = b""

    def tokens(self) -> TokenArray:
        """Return `text` as an array that cannot be written to."""
        return np.frombuffer(self.text, dtype=np.int64)


class PlannedChunk(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens start .. end of one prompt."""

    key: int  # the request's room: workers store data that outlives a forward under this key
    start: int
    end: int
    # Token ids in int64: the chunk's, then as many of the prompt's next ones as the draft reads (if scored, one).
    ids: bytes
    pages: tuple[int, ...]  # the pages of positions 0 .. end
    slot: int = 0  # holds per-request state after the tokens before `start`; 0: the model keeps none
    restore: int = 0  # slot whose state is copied to `slot` first; 0: none
    # (slot, count): the state after `count` tokens of this chunk is also stored in that slot
    saves: tuple[tuple[int, int], ...] = ()
    cached: int = 0  # tokens whose KV came from the prefix cache
    load: HostCopy | None = None  # copied from host memory first: the last pages of `cached`, and the state
    images: tuple[ImageSpan, ...] = ()  # in the whole prompt; pixels and rows stay with the worker
    scored: int | None = None  # prompt_logprobs of the request
    logprob_ids: tuple[int, ...] = ()  # those of the request, if it is scored
    states: int = 0  # how many of its last positions send their hidden states to the router
    draw: FirstDraw | None = None  # set only in the last chunk of a prompt

    @property
    def length(self) -> int:
        return self.end - self.start

    @property
    def final(self) -> bool:
        return self.draw is not None

    def own_tokens(self) -> TokenArray:
        """Return the ids at positions start .. end. The array cannot be written to."""
        return np.frombuffer(self.ids, np.int64, self.end - self.start)

    def tokens(self, first: int, end: int) -> TokenArray:
        """Return the ids at positions first .. end, as far as `ids` goes. The array cannot be written to."""
        return np.frombuffer(self.ids, np.int64)[first - self.start : end - self.start]


class PromptPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Drops data that is no longer needed and stores prefixes, then runs one forward over `chunks` if there are any."""

    generation: int  # ascending
    stores: tuple[Store, ...] = ()  # copies of what earlier plans have computed to host memory
    chunks: tuple[PlannedChunk, ...] = ()  # empty: no forward
    sampling: SamplingVariant | None = None  # the variant that serves all final chunks; None without any
    # Prompts that end before their last chunk. After a last chunk the worker drops the prompt's data without being
    # asked.
    forget: tuple[int, ...] = ()

    @property
    def loads(self) -> list[HostCopy]:
        """The copies from host memory that its forward needs."""
        return [chunk.load for chunk in self.chunks if chunk.load is not None]
