"""The draft's part of a prefill step: its KV for the prompt, and the draft state that the decode node receives."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from common.checkpoint.draft_config import DraftConfig
from common.engine.forward.batch import CaptureHiddenMode, ForwardBatch, ForwardOutput
from common.engine.forward.draft_inputs import DraftInput
from common.engine.forward.draft_runner import DraftRunner
from common.engine.forward.model_runner import ModelRunner
from common.engine.graphs.node_graphs import NodeGraphs
from common.engine.host_copies import send_one
from common.engine.sampling.sampler import SampleOutput
from prefill_node.graphs.prompt_graphs import DraftPrefillPlan, draft_head_graphs, draft_model_graphs
from prefill_node.step_plan import PlannedChunk
from prefill_node.step_rules import PromptRules
from prefill_node.vision import MergedEmbeds


@dataclass(frozen=True, slots=True)
class DraftSetup:
    """The parameters of the draft's part of a prefill step."""

    runner: object  # from LoadedDraft.runner; None if the algorithm has no draft model
    config: DraftConfig | None
    plan: DraftPrefillPlan


class PrefillDraft(Protocol):
    """The part of a prefill step that runs in addition to the target."""

    @property
    def hidden_mode(self) -> CaptureHiddenMode:
        """The hidden states that it reads from the target."""
        ...

    @property
    def rules(self) -> PromptRules:
        """The rows that its forwards read after a chunk and write again before it; never rows of the prefix cache."""
        ...

    def extend(
        self,
        chunks: Sequence[PlannedChunk],
        batch: ForwardBatch,
        output: ForwardOutput,
        sampled: SampleOutput | None,
        embeds: MergedEmbeds | None = None,
    ) -> DraftInput | None:
        """Return one row of state per final chunk, as `sampled` has.

        `embeds`: the target's input if there are images.
        """
        ...

    def forget(self, keys: Iterable[int]) -> None:
        """Drop what is kept from chunk to chunk for prompts that end before their last chunk."""
        ...

    def warm_up(self, batch: ForwardBatch, output: ForwardOutput) -> None:
        """Run what no graph of the target runs, over tokens of one prompt in the padding page.

        Args:
            output: what the target returned for `batch`.
        """
        ...


@dataclass(frozen=True, slots=True)
class BuiltDraft:
    """A PrefillDraft and its forwards, not captured yet."""

    draft: PrefillDraft
    graphs: Sequence[NodeGraphs[Any]] = ()


class NoDraft:
    """No draft model: decode nodes need only the target's KV."""

    hidden_mode = CaptureHiddenMode.NULL
    rules = PromptRules()

    def extend(
        self,
        chunks: Sequence[PlannedChunk],
        batch: ForwardBatch,
        output: ForwardOutput,
        sampled: SampleOutput | None,
        embeds: MergedEmbeds | None = None,
    ) -> DraftInput | None:
        return None

    def forget(self, keys: Iterable[int]) -> None:
        """No-op: nothing is kept from chunk to chunk."""

    def warm_up(self, batch: ForwardBatch, output: ForwardOutput) -> None:
        """No-op: there is no draft model."""


class EaglePrefill:
    """An EAGLE head. Row t reads the token after t: the prompt's next token, also across chunks, or the drawn token."""

    hidden_mode = CaptureHiddenMode.FULL
    rules = PromptRules(lookahead=1)

    def __init__(self, forward: Callable[[ForwardBatch, Tensor, Tensor | None], DraftInput]) -> None:
        """`forward`: a DraftPrefill, which uses graphs where they fit."""
        self._forward = forward

    def extend(
        self,
        chunks: Sequence[PlannedChunk],
        batch: ForwardBatch,
        output: ForwardOutput,
        sampled: SampleOutput | None,
        embeds: MergedEmbeds | None = None,
    ) -> DraftInput | None:
        assert output.hidden is not None
        following = np.concatenate([_next_tokens(chunk) for chunk in chunks])
        ids = send_one(following, batch.input_ids.device)
        if sampled is not None:
            ids[batch.logits_rows] = sampled.token_ids
        rotated = None if embeds is None else embeds.rotated(batch, ids)
        state = self._forward(replace(batch, input_ids=ids), output.hidden, rotated)
        return state if sampled is not None else None

    def forget(self, keys: Iterable[int]) -> None:
        """No-op: nothing is kept from chunk to chunk."""

    def warm_up(self, batch: ForwardBatch, output: ForwardOutput) -> None:
        assert output.hidden is not None
        self._forward(batch, output.hidden, None)


class ModelPrefill:
    """A draft that is a separate language model: it reads the same tokens at the same positions as the target."""

    hidden_mode = CaptureHiddenMode.NULL
    rules = PromptRules()

    def __init__(self, forward: Callable[[ForwardBatch], ForwardOutput]) -> None:
        """`forward`: a PrefillExtend, which uses graphs where they fit."""
        self._forward = forward

    def extend(
        self,
        chunks: Sequence[PlannedChunk],
        batch: ForwardBatch,
        output: ForwardOutput,
        sampled: SampleOutput | None,
        embeds: MergedEmbeds | None = None,
    ) -> DraftInput | None:
        if embeds is not None:  # serving_draft.py already refuses this at start-up
            raise ValueError("this draft model reads only token ids and cannot use image embeddings")
        # The batch may ask for hidden states, which are the target's.
        own = replace(batch, logits_rows=batch.logits_rows[:0], hidden_mode=self.hidden_mode)
        self._forward(own)
        return None

    def forget(self, keys: Iterable[int]) -> None:
        """No-op: nothing is kept from chunk to chunk."""

    def warm_up(self, batch: ForwardBatch, output: ForwardOutput) -> None:
        """No-op: it uses the target's kernels."""


def no_draft(setup: DraftSetup) -> BuiltDraft:
    return BuiltDraft(NoDraft())


def head_draft(setup: DraftSetup) -> BuiltDraft:
    """Build the draft's part for an EAGLE head."""
    assert isinstance(setup.runner, DraftRunner)
    assert setup.config is not None
    graphs = draft_head_graphs(setup.runner, setup.config, setup.plan)
    return BuiltDraft(EaglePrefill(graphs.forward), [graphs])


def model_draft(setup: DraftSetup) -> BuiltDraft:
    """Build the draft's part for a separate language model."""
    assert isinstance(setup.runner, ModelRunner)
    graphs = draft_model_graphs(setup.runner, setup.plan)
    return BuiltDraft(ModelPrefill(graphs.forward), [graphs])


def _next_tokens(chunk: PlannedChunk) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    following = chunk.tokens(chunk.start + 1, chunk.end + 1)
    return np.append(following, 0) if chunk.final else following  # 0 is replaced by the drawn token
