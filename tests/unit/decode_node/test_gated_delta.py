"""A model with gated delta layers on a real pair of nodes, against the same model without a state between calls."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from common.checkpoint.families import LayerKind
from common.checkpoint.gated_delta_config import GatedDeltaConfig
from common.engine.forward.batch import ForwardMode
from common.kv_cache.host_plan import Comparison
from common.kv_cache.layer_kinds import prompt_grid
from common.messages.generation import SamplingParams
from prefill_node.limits import whole_chunks
from prefill_node.step import LaunchedPrefill, PrefillStep
from prefill_node.step_plan import PromptPlan
from tests.fakes import drafters
from tests.fakes.draft_models import drafting
from tests.fakes.drafters import foresight
from tests.fakes.node_cluster import ONE_BEHIND, MakeStep, NodeCluster, Shape, autoregressive
from tests.fakes.tiny_model import CONFIG, VOCAB, tiny_model
from tests.unit.engine.paged_driver import Driver

DELTA = LayerKind("gated_delta")
SERVED = replace(
    CONFIG,
    num_layers=3,
    sliding_windows=(None,) * 3,
    layer_kinds=(DELTA, LayerKind(), DELTA),
    gated_delta=GatedDeltaConfig(key_heads=1, value_heads=3, key_dim=8, value_dim=4, grouped_rows=False),
)
PROMPTS = [[(7 * n + 3 * i + i * i) % VOCAB for i in range(n)] for n in (3, 65, 130, 64, 1)]
STEPS = 3  # drafts of a round


@functools.cache
def expected(prompt: tuple[int, ...], count: int) -> list[int]:
    """The greedy continuation, for which everything is computed again for each token."""
    ids = list(prompt)
    for _ in range(count):
        driver = Driver(tiny_model(config=SERVED), [torch.tensor(ids)], page_size=16)
        ids.append(int(driver.run([0], [len(ids)], ForwardMode.EXTEND).logits[-1].argmax()))
    return ids[len(prompt) :]


def check(cluster: NodeCluster, count: int, prompts: list[list[int]] = PROMPTS) -> None:
    """Serve the prompts at once; every text is the reference's, and nothing leaks."""
    calls = [cluster.submit(prompt, count) for prompt in prompts]
    cluster.run()
    assert [call.ids for call in calls] == [expected(tuple(prompt), count) for prompt in prompts]
    cluster.settle()


@pytest.mark.parametrize("graphs", ["none", "breakable", "piecewise"])
def test_prompts_in_chunks_and_decode_steps_ahead(graphs: str) -> None:
    """Prompts share forwards and are cut on the grid; slots are reused, whose stale states must not be read."""
    shape = Shape(
        model=SERVED,
        prompt_graphs=graphs,
        chunk_tokens=64,
        completion=ONE_BEHIND,
        prefill_slots=3,
        decode_slots=4,
    )
    with NodeCluster(shape) as cluster:
        check(cluster, 10)
        check(cluster, 4, PROMPTS[::-1])


def test_no_chunk_ends_off_the_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    """The chunk form is exact only up to rounding, so the same prompt is always cut at the same places."""
    assert prompt_grid(SERVED, 16) == 64
    with NodeCluster(Shape(model=SERVED, chunk_tokens=128, completion=ONE_BEHIND)) as cluster:
        ends: list[Any] = []
        launch = PrefillStep.launch

        def spy(step: PrefillStep, plan: PromptPlan, load: Callable[[], Comparison]) -> LaunchedPrefill:
            ends.extend(chunk.end for chunk in plan.chunks if not chunk.final)
            return launch(step, plan, load)

        monkeypatch.setattr(PrefillStep, "launch", spy)
        check(cluster, 2, [PROMPTS[0], PROMPTS[2], PROMPTS[2][:129], PROMPTS[1]])
        assert ends
        assert not [end for end in ends if end % 64]


def guesses(buckets: tuple[int, ...] = ()) -> MakeStep:
    """Draft the tokens of plain decoding, each right with some probability: windows of every accepted length."""
    return foresight(0.6, STEPS + 1, 1, buckets)


@pytest.fixture(autouse=True)
def _known_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    def reference(prompt: tuple[int, ...], sampling: SamplingParams, emitted: int) -> tuple[list[int], str]:
        return expected(prompt, sampling.max_tokens - emitted), "length"

    monkeypatch.setattr(drafters, "reference", reference)


@pytest.mark.parametrize("buckets", [(), (2, 8)], ids=["eager", "graphs"])
def test_rounds_of_speculation(buckets: tuple[int, ...]) -> None:
    """Accepted tokens are added to the state in the next round, however many they were; launched ahead."""
    shape = Shape(model=SERVED, step=guesses(buckets), completion=ONE_BEHIND, round_tokens=STEPS + 1)
    with NodeCluster(shape) as cluster:
        check(cluster, 24)
        said = cluster.decode.link.counters
        assert 20 < said.spec_accepted_tokens < said.spec_draft_tokens


@pytest.mark.parametrize("name", ["eagle3", "standalone"])
def test_drafts_of_a_model_with_attention_only(name: str) -> None:
    """Rejected drafts leave the target's state as it was, whoever makes them."""
    draft, step = drafting(name, STEPS)
    shape = Shape(
        model=SERVED, draft=draft, step=step, completion=ONE_BEHIND, round_tokens=STEPS + 1, prefill_batch=2
    )
    with NodeCluster(shape) as cluster:
        check(cluster, 12, PROMPTS[:3])
        assert cluster.decode.link.counters.spec_draft_tokens > 0


@pytest.mark.parametrize("wanted", [1, 7, 63, 65, 1000])
def test_any_configured_size_of_a_chunk(wanted: int) -> None:
    """Sizes are rounded to the grid; pages are sent layer by layer, the state once at the end."""
    shape = Shape(model=SERVED, chunk_tokens=whole_chunks(wanted, 64), layers=True, prompt_graphs="none")
    with NodeCluster(shape) as cluster:
        check(cluster, 4, PROMPTS[1:4])


@pytest.mark.parametrize("step", [autoregressive, guesses()], ids=["plain", "drafts"])
@pytest.mark.parametrize("snapshots", [0, 8])
def test_a_decode_node_reuses_pages_and_receives_the_state(step: MakeStep, snapshots: int) -> None:
    """The next turn of a conversation brings only the pages that the decode node lacks, and its whole state."""
    shape = Shape(
        model=SERVED,
        step=step,
        completion=ONE_BEHIND,
        round_tokens=STEPS + 1,
        prefill_snapshots=snapshots,
        prefill_cache=snapshots > 0,
    )
    with NodeCluster(shape) as cluster:
        received = cluster.decode.receiver.counters
        prompt = PROMPTS[2]
        check(cluster, 30, [prompt])
        assert received.pages_received == 9, "130 tokens"
        turns = [[*prompt, *expected(tuple(prompt), 30), 5, 6], [*prompt[:65], 7, 8]]
        check(cluster, 12, turns)
        # 159 tokens of the first turn have KV, of which nine pages are whole; those of the other turn share four.
        assert received.pages_received == 9 + (11 - 9) + (5 - 4)


def test_requests_of_a_lost_decode_node_begin_again_with_their_text() -> None:
    """The state is computed again, from the prompt and what was generated."""
    with NodeCluster(Shape(model=SERVED, decodes=2)) as cluster:
        calls = [cluster.submit(prompt, 12) for prompt in PROMPTS[:3]]
        cluster.turn(6)
        cluster.kill(cluster.decode)
        cluster.lose(cluster.decode)
        cluster.run()
        assert [call.ids for call in calls] == [expected(tuple(call.prompt), 12) for call in calls]
        assert any(call.attempts > 1 for call in calls)
        cluster.settle()


@pytest.mark.parametrize("step", [autoregressive, guesses()], ids=["plain", "drafts"])
def test_a_retracted_request_takes_its_state_along(step: MakeStep) -> None:
    """It comes back to another slot and row, with tokens in its window that the state does not hold."""
    shape = Shape(
        model=SERVED,
        decode_pool=20 * 16,
        reserved_tokens=0,
        step=step,
        completion=ONE_BEHIND,
        round_tokens=STEPS + 1,
    )
    with NodeCluster(shape) as cluster:
        check(cluster, 40, [*PROMPTS, *PROMPTS[:2]])
        assert cluster.decode.link.counters.retractions > 1
        assert cluster.decode.backups.nbytes == cluster.decode.retraction.used_bytes == 0
