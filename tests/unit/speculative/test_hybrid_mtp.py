"""A single MTP module over a target with gated delta layers, as Qwen3.5 has it, on a real pair of nodes.

The target keeps a state per request and the module keeps KV: every draft equals that of a recompute of the whole text.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
import torch

from common.checkpoint.aux_layers import AuxLayers
from common.checkpoint.draft_config import DraftConfig
from common.checkpoint.mtp_format import MtpFormat
from common.engine.attention.paged import PagedAttention
from common.engine.forward.batch import CaptureHiddenMode
from common.engine.forward.draft_runner import DraftRunner
from common.engine.models.mtp import MtpModule, build_mtp
from common.node.loaded_draft import HeadDraft
from common.node.serving_draft import ServingDraft, draft_shape
from decode_node.request import DecodeRequest
from decode_node.speculative.drafters.eagle import ChainGrowth, EagleDrafter
from tests.fakes.draft_models import Observed
from tests.fakes.drafters import Bench, chaining, speculative
from tests.fakes.node_cluster import ONE_BEHIND, NodeCluster, NoDraftModel, Shape
from tests.fakes.pools import plain_pool
from tests.fakes.tiny_grammar import GRAMMARS, tiny_compiler
from tests.fakes.tiny_model import MAX_LEN, PLACEMENT, one_page, tiny_model
from tests.unit.decode_node.test_gated_delta import PROMPTS, SERVED, check, expected
from tests.unit.engine.paged_driver import Driver

STEPS, WIDE = 3, 7
NAMES = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
CONFIG = DraftConfig(
    "mtp",
    replace(SERVED, num_layers=1, sliding_windows=(None,), layer_kinds=()),
    SERVED.hidden_size,
    AuxLayers(),
    None,
    False,
    mtp=MtpFormat("mtp", None, *NAMES, embedding_first=True, chain=True),
    repeats=True,
)
Seen = list[tuple[list[int], list[int]]]


@functools.cache
def module() -> MtpModule:
    (head,) = build_mtp(CONFIG, tiny_model(config=SERVED), PLACEMENT).eval().heads
    generator = torch.Generator().manual_seed(6)
    with torch.no_grad():
        for piece in head.pieces():
            piece.into.normal_(std=0.3, generator=generator)
            if "norm" in piece.name:
                piece.into.add_(1.0)
    return head


class Module(NoDraftModel):
    """The draft as nodes load it."""

    algorithm = "mtp"

    def serving(self) -> ServingDraft:
        return ServingDraft(HeadDraft(module(), 1), CONFIG, "hybrid", draft_shape(CONFIG, 1, PLACEMENT))


class Recorded(Observed):
    """Records every draft; half of the wrong ones are replaced, since a random module is seldom right."""

    # prompt -> the text of plain decoding, of constrained requests
    constrained: Mapping[tuple[int, ...], list[int]] = {}

    def answer(self, request: DecodeRequest) -> list[int]:
        prompt = tuple(request.prompt)
        if request.sampling.grammar:
            return self.constrained[prompt]
        return expected(prompt, request.sampling.max_tokens)


@torch.inference_mode()
def eager_drafts(text: list[int]) -> list[int]:
    """Return the drafts after `text`, whose last token the target has not read."""
    driver = Driver(tiny_model(config=SERVED), [torch.tensor(text[:-1])], page_size=16)
    batch = driver.batch([0], [len(text) - 1], hidden_mode=CaptureHiddenMode.FULL)
    hidden, tokens, shape = driver.runner(batch).hidden, text[1:], CONFIG.model
    assert hidden is not None
    for _ in range(STEPS):
        pool = plain_pool(
            1, shape.num_kv_heads, shape.head_dim, MAX_LEN, 2, PLACEMENT.dtype, PLACEMENT.device
        )
        attention = PagedAttention(pool, (None,))
        forward = one_page(tokens)
        attention.plan(forward)
        output = module()(forward.input_ids, hidden, forward.positions, attention)
        tokens = [*tokens, int(module().compute_logits(output.last[-1:]).argmax())]
        hidden = torch.cat((hidden, output.hidden[-1:]))
    return tokens[-STEPS:]


def recorded(
    seen: Seen, constrained: Mapping[tuple[int, ...], list[int]] | None = None
) -> Callable[[Bench], Recorded]:
    def drafter(bench: Bench) -> Recorded:
        runner = bench.parts.draft
        assert isinstance(runner, DraftRunner)
        inner = EagleDrafter(runner, bench.rounds, ChainGrowth(runner, STEPS), SERVED.hidden_size)
        made = Recorded(inner, bench, 0.5, seen)
        made.constrained = constrained or {}
        return made

    return drafter


def test_forced_tokens_in_a_wider_window() -> None:
    """The next round adds more accepted tokens to the state than a usual round has drafts."""
    plain = Shape(model=SERVED, grammars=tiny_compiler())
    texts: dict[tuple[int, ...], list[int]] = {}
    seen: Seen = []
    step = chaining(speculative(recorded(seen, texts), buckets=(2,)), "mtp", CONFIG, STEPS, WIDE, (1, 2))
    shape = replace(plain, draft=Module(), step=step, completion=ONE_BEHIND, round_tokens=WIDE + 1)
    for each in (plain, shape):
        with NodeCluster(each) as cluster:
            calls = [cluster.submit(prompt, 50, grammar=GRAMMARS["record"]) for prompt in PROMPTS[:2]]
            free = cluster.submit(PROMPTS[0], 8)
            cluster.run()
            cluster.settle()
            said = [call.ids for call in calls]
            assert free.ids == expected(tuple(PROMPTS[0]), 8)
            assert said == [texts.setdefault(tuple(call.prompt), call.ids) for call in calls]
            counters = cluster.decode.link.counters
    assert counters.spec_accepted_forced > 20
    assert counters.steps < max(len(ids) for ids in said) - 10
    assert len(seen) > 6
    for text, drafts in seen:
        assert drafts == eager_drafts(text)[: len(drafts)], f"after {len(text)} tokens"


@pytest.mark.parametrize("buckets", [(), (2,)], ids=["eager", "graphs"])
def test_drafts_equal_a_recompute(buckets: tuple[int, ...]) -> None:
    seen: Seen = []
    shape = Shape(
        model=SERVED,
        draft=Module(),
        step=speculative(recorded(seen), buckets=buckets),
        completion=ONE_BEHIND,
        round_tokens=STEPS + 1,
        prefill_snapshots=4,
    )
    with NodeCluster(shape) as cluster:
        for _ in range(2):  # the second time the longer prompts continue cached prefixes
            check(cluster, 8, PROMPTS[:3])
        assert cluster.prefill.link.counters.cached_tokens == 64 + 128
    assert len(seen) > 6
    for text, drafts in seen:
        assert drafts == eager_drafts(text)[: len(drafts)], f"after {len(text)} tokens"
