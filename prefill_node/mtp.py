"""The prefill of several MTP modules: KV of every module for the prompt, and the first drafts for the decode node.

Module k runs over the rows of a chunk and over the k rows before it, whose tokens were not known earlier: see
`common/engine/models/mtp.py`. It reads the next tokens of the prompt, also across chunks. Past the prompt's end it
reads the drawn token and, for the last k rows, the drafts of the previous modules. Rows in the prefix cache are never
recomputed: the cache keys look as far ahead as the modules do, so their KV is valid for every module.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from common.engine.forward.batch import CaptureHiddenMode, ForwardBatch, ForwardOutput
from common.engine.forward.draft_inputs import DraftInput
from common.engine.forward.draft_runner import DraftRunner
from common.engine.forward.mtp_runner import Module, MtpRunner
from common.engine.host_copies import send, send_one
from common.engine.ops.keep_hidden import keep_hidden
from common.engine.sampling.sampler import SampleOutput
from prefill_node.draft import BuiltDraft, DraftSetup, head_draft
from prefill_node.graphs.prompt_graphs import draft_module_graphs
from prefill_node.step_plan import PlannedChunk
from prefill_node.step_rules import PromptRules
from prefill_node.vision import MergedEmbeds

Ints = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


class ModuleWindows:
    """The rows of one module for each chunk, on the host. `rows` [B + 1] are the first rows of chunks and the total."""

    def __init__(self, chunks: Sequence[PlannedChunk], step: int) -> None:
        self._chunks = chunks
        self._step = step
        self.first = [max(chunk.start - step, chunk.cached) for chunk in chunks]  # positions
        self.ends = [chunk.end for chunk in chunks]
        self.lengths = [end - first for first, end in zip(self.first, self.ends)]
        self.rows: Ints = np.concatenate([[0], np.cumsum(self.lengths)])
        # whether a chunk starts one row earlier than for the previous module
        self.opened = [chunk.start - step >= chunk.cached for chunk in chunks]

    @property
    def last_rows(self) -> Ints:
        """The last rows of final chunks."""
        return np.asarray([end - 1 for end, chunk in zip(self.rows[1:], self._chunks) if chunk.final])

    def positions(self) -> Ints:
        return np.concatenate([np.arange(first, end) for first, end in zip(self.first, self.ends)])

    def tokens(self) -> tuple[Ints, Ints, Ints]:
        """Return (ids, rows, which): tokens to read, rows that read past the prompt, and the token each of these reads.

        Tokens past the prompt are numbered step by step, and within a step by final chunk. In a chunk that is not final
        such a row reads 0, and the next chunk recomputes it.
        """
        ids, rows, which = [], list[int](), list[int]()
        finals = sum(chunk.final for chunk in self._chunks)
        final = 0
        for chunk, row, first, end in zip(self._chunks, self.rows, self.first, self.ends):
            known = chunk.tokens(first + 1 + self._step, end + 1 + self._step)
            ids.append(np.pad(known, (0, end - first - len(known))))
            if chunk.final:
                past_end = range(first + len(known), end)
                rows += [int(row) + position - first for position in past_end]
                which += [(position + 1 + self._step - end) * finals + final for position in past_end]
                final += 1
        return np.concatenate(ids), np.asarray(rows, dtype=np.int64), np.asarray(which, dtype=np.int64)

    def sources(self, before: ModuleWindows) -> Ints:
        """Return the row of the previous module that each row reads; larger values are requests' kept hidden states."""
        count, parts = int(before.rows[-1]), list[Ints]()
        for index, opened in enumerate(self.opened):
            kept = np.arange(count + index, count + index + opened)
            parts += [kept, np.arange(before.rows[index], before.rows[index + 1])]
        return np.concatenate(parts)


class MtpPrefill:
    """The `PrefillDraft` of chained MTP modules."""

    hidden_mode = CaptureHiddenMode.FULL

    def __init__(self, modules: Sequence[Module], page_size: int, carried: int) -> None:
        """`modules`: DraftPrefills, which use graphs where they fit.

        Args:
            carried: hidden values that one module passes to the next.
        """
        self._modules = tuple(modules)
        self._page_size = page_size
        self._carried = carried
        # key of a prompt -> [steps - 1, H]: the state that each later module reads first (models/mtp.py)
        self.kept: dict[int, Tensor] = {}

    @property
    def rules(self) -> PromptRules:
        """Module k starts k rows before a chunk (see `ModuleWindows.first`) and reads k + 1 tokens past it."""
        return PromptRules(lookahead=len(self._modules), rewrites=len(self._modules) - 1)

    def extend(
        self,
        chunks: Sequence[PlannedChunk],
        batch: ForwardBatch,
        output: ForwardOutput,
        sampled: SampleOutput | None,
        embeds: MergedEmbeds | None = None,
    ) -> DraftInput | None:
        if embeds is not None:  # serving_draft.py already refuses this at start-up
            raise ValueError("these MTP modules read only token ids and cannot use image embeddings")
        hidden = output.hidden
        assert hidden is not None
        drawn = hidden.new_zeros(0, 0, dtype=torch.int64) if sampled is None else sampled.token_ids[None]
        kept = self._take_kept(chunks, hidden)
        keep = torch.zeros_like(kept)
        owners = torch.arange(len(chunks), device=hidden.device)
        probs: list[Tensor] = []
        before: ModuleWindows | None = None
        for step, module in enumerate(self._modules):
            windows = ModuleWindows(chunks, step)
            if before is not None and any(windows.opened):
                both = torch.cat((hidden, kept[:, step - 1]))
                hidden = both.index_select(0, send_one(windows.sources(before), hidden.device))
            given = module.forward(self._batch(batch, windows, drawn), hidden)
            if sampled is not None:
                state = module.propose(send_one(windows.last_rows, hidden.device), given)
                probs, drawn = [*probs, state.draft_topk_probs], torch.cat((drawn, state.draft_topk_ids.T))
            hidden, before = given.hidden, windows
            if step < keep.shape[1]:
                # The next module reads this in the row before its first unverified one.
                counts = [length - step for length in windows.lengths]
                lens, starts = send((np.asarray(counts, dtype=np.int64), windows.rows[:-1]), hidden.device)
                keep_hidden(hidden, owners, keep, step, lens, starts)
        for chunk, own in zip(chunks, keep):
            if len(own) and not chunk.final:
                self.kept[chunk.key] = own
        if sampled is None:
            return None
        finals = send_one(np.flatnonzero([chunk.final for chunk in chunks]), hidden.device)
        return DraftInput(torch.cat(probs, 1), drawn[1:].T, keep.index_select(0, finals).flatten(1))

    def forget(self, keys: Iterable[int]) -> None:
        for key in keys:
            self.kept.pop(key, None)

    def warm_up(self, batch: ForwardBatch, output: ForwardOutput) -> None:
        hidden, first = output.hidden, batch.logits_rows
        assert hidden is not None
        for module in self._modules:
            given = module.forward(batch, hidden)
            module.propose(first, given)
            hidden = given.hidden
        if len(self._modules) > 1:
            keep_hidden(hidden, first, torch.zeros_like(hidden)[:, None], 0, torch.ones_like(first), first)

    def _take_kept(self, chunks: Sequence[PlannedChunk], hidden: Tensor) -> Tensor:
        """Take out what earlier chunks have kept: [B, steps - 1, H].

        Rows of prompts that start here are zeros, never read.
        """
        nothing = hidden.new_zeros(len(self._modules) - 1, self._carried)
        return torch.stack([self.kept.pop(chunk.key, nothing) for chunk in chunks])

    def _batch(self, batch: ForwardBatch, windows: ModuleWindows, drawn: Tensor) -> ForwardBatch:
        device = batch.input_ids.device
        tokens, rows, which = windows.tokens()
        owners, places = np.repeat(np.arange(len(windows.lengths)), windows.lengths), windows.positions()
        arrays = (
            tokens,
            rows,
            which,
            owners,
            places,
            places // self._page_size,
            windows.rows.astype(np.int32),
        )
        ids, drawn_at, drawn_from, owner, positions, entry, starts = send(arrays, device)
        if len(rows):
            ids[drawn_at] = drawn.flatten()[drawn_from]
        page = batch.page_table[owner, entry]
        return replace(
            batch,
            input_ids=ids,
            positions=positions,
            kv_slots=page.to(torch.int64) * self._page_size + positions % self._page_size,
            query_start=starts,
            logits_rows=batch.logits_rows[:0],
            query_lens_host=tuple(windows.lengths),
        )


def module_draft(setup: DraftSetup) -> BuiltDraft:
    """Build the draft's part for MTP; a single module that runs at every step is prefilled like an EAGLE head."""
    if isinstance(setup.runner, DraftRunner):
        return head_draft(setup)
    assert isinstance(setup.runner, MtpRunner)
    assert setup.config is not None
    graphs = draft_module_graphs(setup.runner, setup.config, setup.plan)
    page_size = setup.plan.target.pool.page_size
    modules, carried = [each.forward for each in graphs], DraftInput.hidden_size_for(setup.config)
    return BuiltDraft(MtpPrefill(modules, page_size, carried), graphs)
