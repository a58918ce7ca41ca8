"""Draft prefill under its own graph, on the tape, gives the drafts and draft KV of an eager run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from common.checkpoint.draft_config import DraftConfig, target_width
from common.engine.attention.paged import PagedAttention
from common.engine.forward.batch import CaptureHiddenMode, ForwardBatch
from common.engine.forward.draft_inputs import DraftInput
from common.engine.forward.draft_runner import DraftRunner
from common.engine.graphs.admission import Fallback
from common.engine.graphs.backends.base import Backend
from common.engine.graphs.backends.full import FullGraphs
from common.engine.graphs.backends.none import NoGraphs
from common.engine.graphs.backends.tape import TapeRecorder
from common.engine.graphs.ladders import prefill_token_buckets
from common.engine.graphs.slots import SlotError
from common.engine.state.pool import KvPool
from prefill_node.draft import EaglePrefill, ModelPrefill, NoDraft
from prefill_node.graphs.backends.breakable import BreakableGraphs
from prefill_node.graphs.draft_prefill import DraftPrefill, DraftPrefillCall, draft_prefill_spec
from prefill_node.mtp import MtpPrefill
from tests.fakes.draft_models import DRAFTS, tiny_draft
from tests.fakes.fitting_graph import fitting_graph
from tests.fakes.pools import plain_pool
from tests.fakes.rounding import expect_close
from tests.fakes.tiny_model import CONFIG, PLACEMENT, VOCAB, tiny_model
from tests.unit.engine.graphs.rig import sequences
from tests.unit.engine.paged_driver import Driver

NULL, LAST, FULL = CaptureHiddenMode
LENGTHS = (60, 41, 23, 9)
BUCKETS = (4, 8, 16, 32, 48)
# (sequences, new tokens of each): chunks, cached prefixes, growing and shrinking, below, at and above 48
STEPS = [
    ([0, 1], [20, 7]),
    ([0, 2, 1], [5, 3, 8]),
    ([3], [8]),
    ([0, 1, 2], [28, 17, 20]),
    ([0], [7]),
    ([1, 3], [9, 1]),
]


def breakable() -> Backend:
    return BreakableGraphs(TapeRecorder())


def runner(name: str, pages: int, page_size: int = 4) -> tuple[DraftRunner, KvPool]:
    head, config = tiny_draft(name), DRAFTS[name]
    model = config.model
    layers = model.num_layers
    pool = plain_pool(
        layers, model.num_kv_heads, model.head_dim, page_size, pages, PLACEMENT.dtype, PLACEMENT.device
    )
    return DraftRunner(head, PagedAttention(pool, model.sliding_windows), topk=3), pool


@dataclass
class Rig:
    """The same prompts in an eager draft and in one under graphs."""

    config: DraftConfig
    driver: Driver
    eager: DraftRunner
    eager_pool: KvPool
    graphed: DraftPrefill
    pool: KvPool

    @classmethod
    def of(
        cls,
        name: str,
        backend: Callable[[], Backend] = breakable,
        buckets: tuple[int, ...] = BUCKETS,
        poisoned: bool = False,
    ) -> Rig:
        config = DRAFTS[name]
        driver = Driver(tiny_model(aux=config.aux_layers), sequences(LENGTHS), 4)
        pages = driver.pool.num_pages
        eager, eager_pool = runner(name, pages)
        inner, pool = runner(name, pages)
        spec = draft_prefill_spec(buckets)
        graphed = DraftPrefill(inner, config, 4, spec, backend(), poisoned)
        graphed.graphs.capture()
        assert not [row.error for row in graphed.graphs.rows if row.error]
        return cls(config, driver, eager, eager_pool, graphed, pool)

    def batch(self, rows: list[int], lengths: list[int]) -> ForwardBatch:
        """A batch that wants proposals for every request's last row."""
        batch = self.driver.batch(rows, lengths, hidden_mode=FULL)
        return replace(batch, logits_rows=(batch.query_start[1:] - 1).to(torch.int64))

    def hidden(self, batch: ForwardBatch, seed: int = 0) -> Tensor:
        """Hidden states that a target might have computed."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(len(batch.input_ids), target_width(self.config), generator=generator)


def same(actual: DraftInput, expected: DraftInput) -> bool:
    return all(
        torch.equal(getattr(actual, name), getattr(expected, name))
        for name in ("draft_topk_probs", "draft_topk_ids", "hidden")
    )


def expect_same(actual: DraftInput, expected: DraftInput) -> None:
    """Compare a padded and an unpadded forward: equal proposals, and equal numbers up to rounding."""
    assert torch.equal(actual.draft_topk_ids, expected.draft_topk_ids)
    expect_close(actual.draft_topk_probs, expected.draft_topk_probs)
    expect_close(actual.hidden, expected.hidden)


def pages_of(pool: KvPool) -> Tensor:
    """Draft KV without page 0, which is padding."""
    planes = [plane for layer in range(pool.num_layers) for plane in (pool.key(layer), pool.value(layer))]
    return torch.stack([plane[1:] for plane in planes])


@pytest.mark.parametrize("poisoned", [False, True])
@pytest.mark.parametrize("backend", [NoGraphs, breakable])
@pytest.mark.parametrize("name", DRAFTS)
def test_replay_equals_eager(name: str, backend: Callable[[], Backend], poisoned: bool) -> None:
    """Rows A3, A5, A6: proposals, draft states and draft KV, with live hidden states copied in and poisoned padding."""
    rig = Rig.of(name, backend, poisoned=poisoned)
    for step, (rows, lengths) in enumerate(STEPS):
        batch = rig.batch(rows, lengths)
        hidden = rig.hidden(batch, step)
        expect_same(rig.graphed(batch, hidden), rig.eager.extend(batch, hidden))
        rig.driver.run(rows, lengths)  # advances the sequences
    expect_close(pages_of(rig.pool), pages_of(rig.eager_pool))
    counters = rig.graphed.graphs.counters
    assert counters.replays.total() == len(STEPS) - 1
    assert counters.fallbacks == {Fallback.TOO_LARGE: 1}


def test_draft_prefill_replay_sees_live_hidden() -> None:
    """A regression of the reference system: the same tokens after other hidden states must give other results."""
    rig = Rig.of("eagle3")
    batch = rig.batch([0], [8])
    states = [rig.graphed(batch, rig.hidden(batch, seed)) for seed in (1, 2, 1)]
    assert rig.graphed.graphs.counters.replays.total() == 3
    assert not torch.equal(states[0].hidden, states[1].hidden)
    assert same(states[0], states[2])
    short = rig.batch([0], [3])  # its padding is where the longer prompt's hidden states were
    expect_same(rig.graphed(short, rig.hidden(short, 5)), rig.eager.extend(short, rig.hidden(short, 5)))


@pytest.mark.parametrize("tokens", [8, 49])
def test_hidden_states_of_another_width_raise(tokens: int) -> None:
    """Rows A4, D: replayed or eager, never with stale or silently truncated hidden states."""
    rig = Rig.of("eagle3")
    batch = rig.batch([0], [tokens])
    with pytest.raises(SlotError, match=r"slot 'hidden'.*declared \(\d+, 96\)"):
        rig.graphed(batch, rig.hidden(batch)[:, :64])


def test_captured_last_while_the_target_is_captured_full() -> None:
    """Row A2: the draft keeps the state after a prompt's last token, the target returns all of them."""
    rig = Rig.of("eagle")
    assert rig.graphed.graphs.spec.hidden is LAST
    assert EaglePrefill.hidden_mode is MtpPrefill.hidden_mode is FULL, (
        "`build` captures the target in this mode"
    )
    assert NoDraft.hidden_mode is ModelPrefill.hidden_mode is NULL
    assert {(row.phase, row.model, row.hidden) for row in rig.graphed.graphs.rows} == {
        ("prefill", "draft", "LAST")
    }
    batch = rig.batch([0, 1], [6, 3])
    state = rig.graphed(batch, rig.hidden(batch))
    assert state.draft_topk_probs.shape == state.draft_topk_ids.shape == (2, 3)
    assert state.hidden.shape == (2, 32)


@pytest.mark.parametrize("name", ["eagle", "eagle3-full-vocabulary"])
def test_the_graph_follows_the_shared_embedding_and_head(name: str) -> None:
    """Row A9: the graph contains neither, and both are the target's own storage."""
    head, target = tiny_draft(name), tiny_model(aux=DRAFTS[name].aux_layers)
    assert head.embed_tokens.weight.data_ptr() == target.embed_tokens.weight.data_ptr()
    assert head.lm_head.dense().data_ptr() == target.lm_head.dense().data_ptr()
    rig = Rig.of(name)
    batch = rig.batch([0], [8])
    hidden = rig.hidden(batch)
    before = rig.graphed(batch, hidden)
    generator = torch.Generator().manual_seed(8)
    noise = torch.randn(target.embed_tokens.weight.shape, generator=generator)
    weights = (target.embed_tokens.weight, target.lm_head.dense())
    kept = [weight.detach().clone() for weight in weights]
    try:
        for weight in weights:
            weight.data.add_(noise)
        after = rig.graphed(batch, hidden)
        assert not torch.equal(after.hidden, before.hidden)
        expect_same(after, rig.eager.extend(batch, hidden))
    finally:
        for weight, original in zip(weights, kept):
            weight.data.copy_(original)


def test_given_embeddings_replay_the_same_graph_as_text() -> None:
    """Rows A7, C4: placeholder ids are never looked up when embeddings are given."""
    rig = Rig.of("eagle3")
    batch = rig.batch([0], [7])
    hidden, embeds = rig.hidden(batch), rig.eager.head.embed(batch.input_ids)
    expected = rig.eager.extend(batch, hidden)
    placeholders = replace(batch, input_ids=torch.full_like(batch.input_ids, VOCAB + 10**6))
    expect_same(rig.graphed(placeholders, hidden, embeds), expected)
    expect_same(rig.graphed(batch, hidden), expected)
    assert rig.graphed.graphs.counters.replays.total() == 2
    with pytest.raises(SlotError, match="slot 'embeds'"):
        rig.graphed(batch, hidden, embeds[:, :-1])


def test_only_eligible_batches_replay() -> None:
    rig = Rig.of("eagle")
    for tokens, expected in ((3, (4, "")), (1, (None, "padding")), (49, (None, "too_large"))):
        batch = rig.batch([0], [tokens])
        shape, why = fitting_graph(rig.graphed.graphs, DraftPrefillCall(batch, rig.hidden(batch)))
        assert (shape and shape.tokens, why) == expected


def test_default_ladder_replays_at_least_95_percent_and_no_graph_is_dead() -> None:
    """With default buckets at least 95 % of draft forwards replay, and every captured graph replays."""
    rig = Rig.of("eagle3", buckets=prefill_token_buckets(48))
    for tokens in (*prefill_token_buckets(48), 5, 17, 30, 33, 47):
        batch = rig.batch([0], [tokens])
        rig.graphed(batch, rig.hidden(batch))
    totals = rig.graphed.graphs.totals()
    assert (totals.model, totals.phase, totals.unused, totals.fallbacks) == ("draft", "prefill", 0, {})


def test_a_backend_without_breaks_is_refused() -> None:
    inner, pool = runner("eagle", 4)
    with pytest.raises(ValueError, match="prefill needs a breakable one"):
        DraftPrefill(
            inner, DRAFTS["eagle"], pool.page_size, draft_prefill_spec((4,)), FullGraphs(TapeRecorder())
        )


def test_without_shapes_every_prompt_is_eager() -> None:
    """Rows A8, A11, B5: a draft without graphs is skipped at capture and still has its forward."""
    rig = Rig.of("eagle", NoGraphs, ())
    batch = rig.batch([0], [9])
    expect_same(rig.graphed(batch, rig.hidden(batch)), rig.eager.extend(batch, rig.hidden(batch)))
    assert rig.graphed.graphs.counters.fallbacks == {Fallback.NO_GRAPHS: 1}
    assert CONFIG.hidden_size == 32
