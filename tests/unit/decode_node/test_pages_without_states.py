"""Random conversations on decode nodes that cache pages of a model whose states come from the prefill nodes.

Whatever is reused, evicted, retracted, flushed, damaged or lost, every text is that of a pair of nodes without prefix
caches, and so is every draft that follows it. TANDEM_EXPLORE=1 runs many seeds.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from common.messages.generation import SamplingParams
from common.messages.node_inbox import FlushCache
from common.node.completion import Deferred, Immediate
from kv_transfer.limits import TransferLimits
from tests.fakes import draft_models, drafters, mtp_models
from tests.fakes.draft_models import MODELS
from tests.fakes.drafters import foresight
from tests.fakes.late_host import late_lanes
from tests.fakes.loopback import Damage, Fault
from tests.fakes.mtp_models import Seen
from tests.fakes.node_cluster import (
    Call,
    HostShape,
    MakeStep,
    NodeCluster,
    NoDraftModel,
    Shape,
    autoregressive,
)
from tests.fakes.scenarios import SAMPLED, prompt_of
from tests.unit.decode_node.test_gated_delta import SERVED, expected

SEEDS = range(400) if "TANDEM_EXPLORE" in os.environ else (3, 25)
STEPS = 3  # drafts of a round
TRANSFER = TransferLimits(record_bytes=8192, slots_timeout=3.0, first_page_timeout=3.0, stall_timeout=1.0)
STEMS = [prompt_of(length, length) for length in (16, 64, 70, 130)]
DRAFTERS = ["none", "foresight", "eagle3", "eagle3-window", "eagle", "mtp-one-module", "mtp", "standalone"]
DAMAGES: list[Damage] = ["drop", "fail", "truncate", "corrupt", "duplicate", "stick"]


@pytest.fixture(autouse=True)
def _known_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    def reference(prompt: tuple[int, ...], sampling: SamplingParams, emitted: int) -> tuple[list[int], str]:
        return expected(prompt, sampling.max_tokens - emitted), "length"

    for module in (drafters, draft_models):
        monkeypatch.setattr(module, "reference", reference)


@dataclass
class Drafts:
    """The drafts of all rounds of some clusters, by the text that they follow."""

    name: str
    chains: list[tuple[list[int], list[int]]] = field(default_factory=list)
    modules: list[Seen] = field(default_factory=list)

    def parts(self, hit: float) -> tuple[NoDraftModel, MakeStep]:
        if self.name == "none":
            return NoDraftModel(), autoregressive
        if self.name == "foresight":
            return NoDraftModel(), foresight(hit, STEPS + 1, 1)
        if self.name == "mtp":
            return mtp_models.observed("mtp", STEPS, hit, self.modules)
        assert self.name in MODELS
        return draft_models.observed(self.name, STEPS, hit, self.chains)

    def expect_equal(self) -> None:
        """Expect the same drafts after the same text, and the same KV of MTP modules."""
        known: dict[tuple[int, ...], list[int]] = {}
        for text, drafts in self.chains + [(each.text, each.drafts) for each in self.modules]:
            before = known.setdefault(tuple(text), drafts)
            count = min(len(before), len(drafts))
            assert drafts[:count] == before[:count], f"after {len(text)} tokens"
        planes: dict[tuple[int, ...], torch.Tensor] = {}
        for seen in self.modules:
            before_planes = planes.setdefault(tuple(seen.text), seen.planes)
            for index, (found, wanted) in enumerate(zip(seen.planes, before_planes, strict=True)):
                count = len(seen.text) - 1 - index // 2
                torch.testing.assert_close(found[:count], wanted[:count], atol=1e-3, rtol=1e-3)


def shape_of(rng: random.Random, drafts: Drafts) -> Shape:
    draft, step = drafts.parts(rng.choice((0.5, 0.9)))
    page_size = rng.choice((4, 16, 32))
    snapshots = rng.choice((0, 2, 8))
    layers = rng.random() < 0.3
    return Shape(
        model=SERVED,
        draft=draft,
        step=step,
        round_tokens=1 if drafts.name == "none" else STEPS + 1,
        page_size=page_size,
        chunk_tokens=rng.choice((64, 128)),
        prefill_pool=rng.choice((256, 1024)),
        decode_pool=rng.choice((256, 384, 2048)),
        prefill_batch=rng.choice((1, 2, 8)),
        prefill_slots=rng.choice((3, 16)),
        prefill_snapshots=snapshots,
        prefill_cache=snapshots > 0,
        host=HostShape(blocks=24, slots=3, block_pages=64 // page_size, lanes=late_lanes)
        if snapshots and rng.random() < 0.3
        else None,
        decode_slots=rng.choice((4, 24)),
        max_running=rng.choice((2, 4, 8)),
        max_transferring=rng.choice((1, 3, 8)),
        reserved_tokens=rng.choice((0, 4, 16)),
        skip_ahead=rng.choice((0, 2, 8)),
        backup_bytes=rng.choice((0, 1 << 16, 1 << 22)),
        completion=rng.choice((Immediate, Deferred)),
        prompt_graphs="none" if layers else "breakable",
        layers=layers,
        decodes=rng.choice((1, 2)),
        fencing=rng.random() < 0.5,
        checks_later=rng.random() < 0.5,
        transfer=TRANSFER,
    )


def converse(cluster: NodeCluster, rng: random.Random, sampled: bool, chaos: bool) -> None:
    """Let conversations with shared beginnings go on, some of them at once."""

    def fault(number: int) -> Fault:
        delay = rng.choice((0, 0, 0, 0.003, 0.02))
        return Fault(delay, rng.choice(DAMAGES) if chaos and rng.random() < 0.03 else "none")

    cluster.fabric.plan = fault
    shape = cluster.shape
    longest = min(shape.prefill_pool, shape.decode_pool, 256)
    for _ in range(rng.choice((150, 250))):
        open_calls = [call for call in cluster.calls if not call.over]
        if rng.random() < 0.15 and len(open_calls) < 8 and len(cluster.calls) < 24:
            prompt = _prompt(cluster, rng, longest)
            count = rng.randint(1, min(longest - len(prompt), 24))
            sampling: dict[str, Any] = {"seed": rng.choice((1, 2)), **SAMPLED} if sampled else {}
            decode = rng.choice([index for index, side in enumerate(cluster.decodes) if side.alive])
            salt = rng.choice((b"", b"", b"", b"other"))
            for choice in range(rng.choice((1, 1, 1, 3))):
                if sampled:
                    sampling["seed"] += choice
                cluster.submit(
                    prompt, count, decode=decode, legs=rng.choice(("dp", "pd")), salt=salt, **sampling
                )
        if open_calls and rng.random() < 0.02:
            cluster.abort(rng.choice(open_calls))
        if rng.random() < 0.02:
            for side in (*cluster.prefills, *cluster.decodes):
                side.link.deliver(FlushCache())
        if chaos and rng.random() < 0.01:
            cluster.lose(rng.choice([*cluster.prefills, *cluster.decodes]))
        alive = [side for side in cluster.decodes if side.alive]
        if len(alive) > 1 and rng.random() < 0.01:
            cluster.kill(alive[-1])
            cluster.lose(alive[-1])
        cluster.turn()
    cluster.fabric.plan = lambda number: Fault()
    cluster.fabric.unstick()
    cluster.run(limit=20000, dt=0.002)
    cluster.clock.now += 40
    cluster.settle(limit=4000)


def _prompt(cluster: NodeCluster, rng: random.Random, longest: int) -> list[int]:
    """Return a new prompt, one that is there already, or the next turn of a conversation."""
    done = [call for call in cluster.calls if call.finish is not None]
    prompt = list(rng.choice(STEMS))
    if done and rng.random() < 0.6:
        call = rng.choice(done)
        prompt = call.prompt + call.ids[: rng.choice((0, len(call.ids), len(call.ids)))]
    prompt += prompt_of(rng.choice((0, 0, 1, 2, 5, 17)), rng.randint(0, 2))
    return prompt[: longest - 2]


def expect_same(calls: list[Call], drafts: Drafts) -> None:
    """Expect the texts and the drafts of nodes that cache nothing and have room for everything."""
    draft, step = drafts.parts(0.7)
    shape = Shape(
        model=SERVED,
        draft=draft,
        step=step,
        round_tokens=1 if drafts.name == "none" else STEPS + 1,
        prefill_pool=1 << 14,
        decode_pool=1 << 14,
        prefill_cache=False,
        decode_cache=False,
        transfer=TransferLimits(record_bytes=8192, slots_timeout=1e6),
    )
    with NodeCluster(shape) as cluster:
        for call in calls:
            again = cluster.submit(call.prompt, call.sampling.max_tokens, **_sampling(call))
            cluster.run()
            if call.finish is None:
                assert call.ids == again.ids[: len(call.ids)]
            else:
                assert (call.ids, call.finish) == (again.ids, again.finish)
    drafts.expect_equal()


def _sampling(call: Call) -> dict[str, Any]:
    names = ("temperature", "seed", "top_p", "top_k")
    return {name: getattr(call.sampling, name) for name in names}


@pytest.mark.parametrize("seed", SEEDS)
def test_conversations(seed: int) -> None:
    rng = random.Random(seed)
    drafts = Drafts(DRAFTERS[seed % len(DRAFTERS)])
    # The drafters of tests know greedy texts only.
    sampled, chaos = drafts.name == "none" and rng.random() < 0.5, rng.random() < 0.4
    with NodeCluster(shape_of(rng, drafts)) as cluster:
        converse(cluster, rng, sampled, chaos)
        calls = cluster.calls
        for call in calls:
            assert call.aborted or call.error is None, call.error
    expect_same(calls, drafts)
