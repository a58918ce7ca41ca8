"""FP8 on several ranks: each has its share of the codes and scales of one rank, and results differ by rounding."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from common.checkpoint.experts_config import ExpertsConfig, RouterRule
from common.checkpoint.fp8_weights import BLOCK, CHANNEL, EVERYTHING, ONLINE, TENSOR, Fp8Scheme, Fp8Weights
from common.engine.formats.fp8 import Fp8Format
from common.engine.formats.fp8_experts import Fp8Experts
from common.engine.forward.model_runner import load_model
from common.engine.layers.linear import Linear
from common.engine.layers.piece import Piece
from common.engine.layers.ranks import ONE_RANK, OneRank, Ranks, divide_by_expert
from common.engine.ops.fp8_codes import FP8
from common.errors import ModelError
from common.kv_cache.plane import HeadGroup
from common.kv_cache.shard import Shard
from tests.fakes.fp8_checkpoint import write_checkpoint
from tests.fakes.fp8_sections import SECTIONS
from tests.fakes.memory_checkpoint import fill
from tests.fakes.thread_ranks import run_ranks
from tests.fakes.tiny_model import PLACEMENT
from tests.unit.engine.paged_driver import Driver

MODELS = Path(__file__).parents[3] / "deploy" / "tiny_models"
IDS = torch.arange(20) * 7 % 90
STORED = {
    "tensor": Fp8Weights("fp8", ((EVERYTHING, Fp8Scheme(TENSOR)),)),
    "tensor, static": Fp8Weights("fp8", ((EVERYTHING, Fp8Scheme(TENSOR, static=True)),)),
    "channel": Fp8Weights("fp8", ((EVERYTHING, Fp8Scheme(CHANNEL)),)),
    "block": Fp8Weights("fp8", ((EVERYTHING, Fp8Scheme(BLOCK, scale="weight_scale_inv")),)),
    "online": ONLINE,
}
HEADS = HeadGroup(4, 128)
EXPERTS = ExpertsConfig(3, 512, RouterRule(2), shared=2)


def drawn(pieces: list[Piece]) -> dict[str, Tensor]:
    """Return tensors for these pieces: codes, scales, or dense values where the pieces quantise."""
    generator = torch.Generator().manual_seed(0)
    found: dict[str, Tensor] = {}
    for piece in pieces:
        values = torch.randn(piece.whole, generator=generator)
        if piece.into.dtype == FP8 and piece.store is None:
            found[piece.name] = values.to(FP8)
        else:
            found[piece.name] = values.abs() + 0.1 if "scale" in piece.name else values
    return found


def products(stored: Fp8Weights, ranks: Ranks) -> tuple[Linear, Linear, Fp8Experts]:
    """Return a product with divided rows, one with divided columns, and experts."""
    made = Fp8Format(stored, replace(PLACEMENT, ranks=ranks))
    experts = made.make_experts("layer", 256, EXPERTS)
    assert isinstance(experts, Fp8Experts)
    return made.linear(256, {"a": HEADS, "b": HEADS}, False), made.linear(HEADS, {"c": 256}, True), experts


def values(codes: Tensor, scales: Tensor) -> Tensor:
    """Return the weights of experts, whose codes have a scale per row or per block."""
    if scales.ndim == codes.ndim - 1:
        return codes.float() * scales[..., None]
    wide = scales.repeat_interleave(128, -2).repeat_interleave(128, -1)
    return codes.float() * wide[..., : codes.shape[-2], : codes.shape[-1]]


def expert_weights(experts: Fp8Experts) -> tuple[Tensor, Tensor, Tensor]:
    """Return gates [E, I, H], ups [E, I, H] and downs [E, H, I]."""
    gates, ups = experts.gate_up.chunk(2, dim=1)
    scales = experts.gate_up_scales
    of_gates, of_ups = scales.unbind(1) if scales.ndim == 4 else scales.chunk(2, dim=1)
    return values(gates, of_gates), values(ups, of_ups), values(experts.down, experts.down_scales)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("stored", STORED.values(), ids=STORED)
def test_ranks_have_the_weights_of_one_rank(stored: Fp8Weights, size: int) -> None:
    """Scales are those of whole rows and blocks, also where ranks divide the columns of a weight."""
    whole = products(stored, ONE_RANK)
    tensors = drawn([piece for each in whole for piece in each.pieces()])
    parts = [products(stored, OneRank(Shard(rank, size))) for rank in range(size)]
    for made in (whole, *parts):
        for each in made:
            fill(each.pieces(), tensors)
    halves = [part[0].dense().chunk(2) for part in parts]
    assert torch.equal(whole[0].dense(), torch.cat([half for pair in zip(*halves) for half in pair]))
    assert torch.equal(whole[1].dense(), torch.cat([part[1].dense() for part in parts], dim=1))
    pieces = zip(*(expert_weights(part[2]) for part in parts), strict=True)
    for expected, found, axis in zip(expert_weights(whole[2]), pieces, (1, 1, 2), strict=True):
        assert torch.equal(expected, torch.cat(found, dim=axis))


@pytest.mark.parametrize("stored", STORED.values(), ids=STORED)
def test_ranks_have_whole_experts(stored: Fp8Weights) -> None:
    """Three routed experts and two shared ones; blocks of scales are never cut."""
    whole = products(stored, ONE_RANK)[2]
    tensors = drawn(list(whole.pieces()))
    parts = [products(stored, OneRank(Shard(rank, 4), divide_by_expert))[2] for rank in range(4)]
    for made in (whole, *parts):
        fill(made.pieces(), tensors)
    pieces = zip(*(expert_weights(part) for part in parts), strict=True)
    for expected, found in zip(expert_weights(whole), pieces, strict=True):
        assert torch.equal(expected, torch.cat(found))


def test_what_cuts_through_blocks_is_refused_on_every_rank() -> None:
    for rank in range(2):
        made = Fp8Format(STORED["block"], replace(PLACEMENT, ranks=OneRank(Shard(rank, 2))))
        with pytest.raises(ModelError, match="inside a block of 128 x 128 .* use fewer ranks"):
            list(made.linear(HeadGroup(2, 192), {"c": 256}, False).pieces())


@torch.inference_mode()
def logits(path: Path, quantization: str, ranks: Ranks) -> Tensor:
    model = load_model(path, "float32", ranks=ranks, quantization=quantization)[0]
    return Driver(model, [IDS], page_size=4).run_all(7, [14])[0]


def check_ranks(dense: Path, path: Path, quantization: str = "none") -> None:
    """Compare the errors of one rank and of two, since activations are quantised with one scale per rank."""
    exact, one = logits(dense, "none", ONE_RANK), logits(path, quantization, ONE_RANK)
    first, second = run_ranks(2, lambda ranks: logits(path, quantization, ranks))
    assert torch.equal(first, second)
    assert (first - exact).norm() < 2 * (one - exact).norm() < exact.norm()


@pytest.mark.parametrize("model", ["tiny-target", "tiny-moe", "tiny-hybrid"])
def test_models_that_are_quantised_while_loading(model: str) -> None:
    check_ranks(MODELS / model, MODELS / model, "fp8")


@pytest.mark.parametrize("form", [form for form in SECTIONS if "block" not in form])
def test_checkpoints_in_every_form(form: str, tmp_path: Path) -> None:
    source = MODELS / "tiny-target"
    check_ranks(source, write_checkpoint(source, tmp_path / "fp8", SECTIONS[form]))
