"""Draft heads and MTP modules that are divided among ranks: the outputs and logits of one rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from common.checkpoint.draft_config import DraftConfig, module_input_for
from common.engine.attention.paged import PagedAttention
from common.engine.forward.draft_inputs import DraftExtendInput
from common.engine.layers.placement import Placement
from common.engine.layers.ranks import ONE_RANK, Ranks
from common.engine.models.causal_lm import CausalLM
from common.engine.models.eagle import Eagle3Head, EagleHead
from common.engine.models.mtp import MtpModule, build_mtp
from tests.fakes.draft_models import DRAFTS, new_head
from tests.fakes.memory_checkpoint import drawn_checkpoint, drawn_tensors, fill, filled_model
from tests.fakes.mtp_models import FORMATS, NARROW, mtp_config
from tests.fakes.pools import model_pool
from tests.fakes.thread_ranks import run_ranks
from tests.fakes.tiny_model import CONFIG, MAX_LEN, PLACEMENT, VOCAB, one_page

COUNT, MODULES = 19, 3
TENSORS = drawn_checkpoint(CONFIG)
Head = Eagle3Head | EagleHead | MtpModule
Make = Callable[[CausalLM, Placement], Sequence[Head]]


def outputs(config: DraftConfig, make: Make, tensors: Mapping[str, Tensor], ranks: Ranks) -> Tensor:
    """Run each of the heads over the same tokens and return what they output for them, flat."""
    placement = replace(PLACEMENT, ranks=ranks)
    heads = make(filled_model(CONFIG, TENSORS, ranks), placement)
    for head in heads:
        fill(head.pieces(), tensors)
    attention = PagedAttention(model_pool(config.model, MAX_LEN, 2, placement), config.model.sliding_windows)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(VOCAB, (COUNT,), generator=generator)
    batch = one_page(ids.tolist())
    attention.plan(batch)
    found = []
    for index, head in enumerate(heads):
        width = DraftExtendInput.hidden_size_for(config) if index == 0 else module_input_for(config, index)
        given = head.project(torch.randn(COUNT, width, generator=generator))
        output = head(ids, given, batch.positions, attention)
        found += [output.last, output.hidden, head.compute_logits(output.last)]
    return torch.cat([each.flatten() for each in found])


@torch.inference_mode()
def check(config: DraftConfig, make: Make) -> None:
    target = filled_model(CONFIG, TENSORS)
    tensors = drawn_tensors([piece for head in make(target, PLACEMENT) for piece in head.pieces()])

    @torch.inference_mode()
    def run(ranks: Ranks) -> Tensor:
        return outputs(config, make, tensors, ranks)

    expected = run(ONE_RANK)
    assert expected.std() > 0.3  # not trivial
    for size in (2, 4):
        first, *others = run_ranks(size, run)
        assert (first - expected).abs().max() < 2e-5 * expected.abs().max()
        assert all(torch.equal(each, first) for each in others)


@pytest.mark.parametrize("name", DRAFTS)
def test_a_head_on_several_ranks(name: str) -> None:
    """Heads with vocabularies, embeddings and LM heads of their own, and those that share the target's."""
    config = DRAFTS[name]
    check(config, lambda target, placement: [new_head(name, config, target, placement).eval()])


@pytest.mark.parametrize("name", [*FORMATS, *NARROW])
def test_modules_on_several_ranks(name: str) -> None:
    config = mtp_config(name, MODULES)
    check(config, lambda target, placement: build_mtp(config, target, placement).eval().heads)
