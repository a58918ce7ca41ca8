"""Models divided among ranks, which are threads here: the same logits and tokens as on one rank."""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor

from common.engine.collectives.endpoints import open_endpoints
from common.engine.collectives.group_ranks import GroupRanks
from common.engine.collectives.shared_memory_group import SharedMemoryGroup
from common.engine.forward.batch import ForwardMode
from common.engine.forward.model_runner import load_model
from common.engine.layers.ranks import ONE_RANK, Ranks, expert_division
from common.errors import RankFailed
from tests.fakes.thread_ranks import run_ranks
from tests.fakes.waiting import PATIENCE
from tests.unit.engine.paged_driver import Driver

MODELS = Path(__file__).parents[3] / "deploy" / "tiny_models"
PROMPTS = (3, 41, 18)  # tokens
DRAWN = 12
CLOSE = 1e-4
MARGIN = 1e-3  # between the two likeliest tokens, so that sums in another order choose the same


def prompts() -> list[Tensor]:
    """Return prompts with room for the tokens that are drawn."""
    generator = torch.Generator().manual_seed(5)
    drawn = torch.zeros(DRAWN, dtype=torch.int64)
    return [torch.cat((torch.randint(3, 640, (n,), generator=generator), drawn)) for n in PROMPTS]


@torch.inference_mode()
def serve(model: str, ranks: Ranks) -> tuple[list[Tensor], Tensor]:
    """Run prompts in chunks, then greedy steps: (sequences, logits of all rows [n, V])."""
    loaded, _ = load_model(MODELS / model, "float32", ranks=ranks)
    driver = Driver(loaded, prompts(), page_size=8)
    found: list[Tensor] = []
    last: dict[int, Tensor] = {}
    while rows := [row for row, count in enumerate(PROMPTS) if driver.done[row] < count]:
        lengths = [min(16, PROMPTS[row] - driver.done[row]) for row in rows]
        logits = driver.run(rows, lengths).logits
        found.append(logits)
        for row, part in zip(rows, logits.split(lengths), strict=True):
            last[row] = part[-1]
    everyone = list(range(len(PROMPTS)))
    for step in range(DRAWN):
        for row in everyone:
            driver.sequences[row][PROMPTS[row] + step] = last[row].argmax()
        logits = driver.run(everyone, [1] * len(everyone), ForwardMode.DECODE).logits
        found.append(logits)
        last = dict(enumerate(logits))
    return driver.sequences, torch.cat(found)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    "model", ["tiny-target", "tiny-moe", "tiny-hybrid", "tiny-tools", "tiny-vision", "tiny-standalone"]
)
def test_ranks_compute_what_one_rank_computes(model: str, size: int) -> None:
    """Four ranks hold two KV heads, so each head is on two of them."""
    texts, logits = serve_once(model)
    best = logits.topk(2).values
    assert (best[:, 0] - best[:, 1]).min() > MARGIN, "near-ties: choose other prompts"
    first, *others = run_ranks(size, lambda ranks: serve(model, ranks))
    assert torch.equal(torch.cat(first[0]), torch.cat(texts))
    assert (first[1] - logits).abs().max() < CLOSE
    assert all(torch.equal(found, first[1]) for _, found in others)


@pytest.mark.parametrize("model", ["tiny-moe", "tiny-hybrid"])
def test_ranks_with_experts_of_their_own_compute_what_one_rank_computes(model: str) -> None:
    texts, logits = serve_once(model)
    found = run_ranks(2, lambda ranks: serve(model, GroupRanks(ranks.group, expert_division(True))))
    for sequences, own in found:
        assert torch.equal(torch.cat(sequences), torch.cat(texts))
        assert (own - logits).abs().max() < CLOSE


@functools.cache
def serve_once(model: str) -> tuple[list[Tensor], Tensor]:
    return serve(model, ONE_RANK)


CHILD = """
import sys
import msgspec
from common.engine.collectives.endpoints import GroupEndpoint
from common.engine.collectives.group_ranks import GroupRanks
from common.engine.collectives.shared_memory_group import SharedMemoryGroup
from tests.unit.engine.test_ranks import serve

group = SharedMemoryGroup(msgspec.json.decode(sys.argv[1], type=GroupEndpoint))
serve("tiny-hybrid", GroupRanks(group))
"""


def test_ranks_in_processes_of_their_own() -> None:
    """The second process ends after its last forward, so one more forward fails."""
    texts, logits = serve_once("tiny-hybrid")
    ours, theirs = open_endpoints(2)
    command = [sys.executable, "-c", CHILD, msgspec.json.encode(theirs).decode()]
    process = subprocess.Popen(command, pass_fds=theirs.descriptors, cwd=MODELS.parents[1])
    theirs.close()
    group = SharedMemoryGroup(ours, 2 * PATIENCE)
    try:
        sequences, found = serve("tiny-hybrid", GroupRanks(group))
        assert process.wait(PATIENCE) == 0
        assert torch.equal(torch.cat(sequences), torch.cat(texts))
        assert (found - logits).abs().max() < CLOSE
        with pytest.raises(RankFailed, match="rank 1 has ended"):
            serve("tiny-hybrid", GroupRanks(group))
    finally:
        process.kill()
        process.wait()
        group.close()
