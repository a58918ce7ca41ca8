"""Every option that changes what ranks divide: each rank reads its blocks, and all compute the same logits."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from common.checkpoint.families import LayerKind
from common.checkpoint.gated_delta_config import GatedDeltaConfig
from common.checkpoint.layer_norms import POST_NORM, LayerNorms
from common.checkpoint.llava_config import LlavaVision
from common.checkpoint.model_config import ModelConfig
from common.engine.collectives.group_ranks import GroupRanks
from common.engine.formats.dense import DenseFormat
from common.engine.layers.parts import Columns, rank_blocks, runs_of
from common.engine.layers.placement import Placement
from common.engine.layers.ranks import (
    ONE_RANK,
    DivideExperts,
    OneRank,
    Ranks,
    divide_by_expert,
    divide_by_tensor,
)
from common.engine.models.llava import LlavaPart
from common.engine.models.model_registry import build_model
from common.engine.weights import fill_piece
from common.errors import ModelError
from common.kv_cache.plane import HeadGroup
from common.kv_cache.shard import Shard
from tests.fakes.int8_format import Int8Format
from tests.fakes.int8_record import METHOD, Int8Weights
from tests.fakes.memory_checkpoint import MemoryTensors, drawn_checkpoint, filled_model
from tests.fakes.thread_ranks import run_ranks
from tests.fakes.tiny_model import CONFIG, MIXTURE, PLACEMENT
from tests.unit.engine.paged_driver import Driver

LENGTHS = (1, 30, 9)
CPU = torch.device("cpu")
TINY_VISION = Path(__file__).parents[3] / "deploy" / "tiny_models" / "tiny-vision"
OUTPUT_NORMS = LayerNorms("", "post_attention_layernorm", "", "post_feedforward_layernorm")
DELTA = GatedDeltaConfig(key_heads=2, value_heads=4, key_dim=8, value_dim=4, grouped_rows=False)
HYBRID = replace(CONFIG, layer_kinds=(LayerKind("gated_delta"), LayerKind()), gated_delta=DELTA)
OPTIONS: Mapping[str, ModelConfig] = {
    "biases": replace(CONFIG, qkv_bias=True, output_bias=True, mlp_bias=True),
    "tied": replace(CONFIG, tie_word_embeddings=True, embedding_scale=5.5),
    "a KV head per rank": replace(CONFIG, num_kv_heads=4),
    "one KV head": replace(CONFIG, num_kv_heads=1),
    "fused": replace(CONFIG, fused=True),
    "norms of heads and outputs": replace(CONFIG, qk_norm=True, layer_norms=OUTPUT_NORMS),
    "norms of tokens": replace(
        CONFIG, qk_norm=True, qk_norm_whole=True, norm_float32=True, layer_norms=POST_NORM
    ),
    "gates of heads": replace(CONFIG, output_gate=True),
    "an odd vocabulary": replace(CONFIG, vocab_size=91),
    "experts": MIXTURE,
    "gated delta": HYBRID,
    "rows by key head": replace(HYBRID, gated_delta=replace(DELTA, grouped_rows=True)),
}


def stored_by_expert(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the same checkpoint with a matrix per expert instead of stacks."""
    found = dict(tensors)
    for name in [name for name in tensors if ".experts." in name and name.endswith("_proj")]:
        stem, _, what = name.rpartition(".")
        for index, expert in enumerate(found.pop(name)):
            parts = {"down_proj": expert}
            if what == "gate_up_proj":
                parts = dict(zip(("gate_proj", "up_proj"), expert.chunk(2)))
            found |= {f"{stem}.{index}.{part}.weight": matrix for part, matrix in parts.items()}
    return found


@torch.inference_mode()
def logits(config: ModelConfig, tensors: Mapping[str, Tensor], ranks: Ranks) -> list[Tensor]:
    model = filled_model(config, tensors, ranks)
    generator = torch.Generator().manual_seed(7)
    texts = [torch.randint(config.vocab_size, (n + 3,), generator=generator) for n in LENGTHS]
    return Driver(model, texts, page_size=4).run_all(None, LENGTHS)


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("size", [2, 4])
def test_an_option_on_several_ranks(option: str, size: int) -> None:
    config = OPTIONS[option]
    tensors = drawn_checkpoint(config)
    expected = torch.cat(logits(config, tensors, ONE_RANK))
    assert expected.std() > 0.5  # the logits are not trivial
    first, *others = run_ranks(size, lambda ranks: torch.cat(logits(config, tensors, ranks)))
    torch.testing.assert_close(first, expected, atol=1e-4, rtol=1e-5)
    assert all(torch.equal(each, first) for each in others)


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_with_whole_experts(size: int) -> None:
    """Six routed experts and a shared one, which the last rank has, from stacks and from a matrix per expert."""
    stacks = drawn_checkpoint(MIXTURE)
    expected = torch.cat(logits(MIXTURE, stacks, ONE_RANK))
    for tensors in (stacks, stored_by_expert(stacks)):
        run = functools.partial(logits_by_expert, tensors)
        first, *others = run_ranks(size, run)
        torch.testing.assert_close(first, expected, atol=1e-4, rtol=1e-5)
        assert all(torch.equal(each, first) for each in others)


def logits_by_expert(tensors: Mapping[str, Tensor], ranks: GroupRanks) -> Tensor:
    return torch.cat(logits(MIXTURE, tensors, GroupRanks(ranks.group, divide_by_expert)))


def test_whole_experts_that_are_fewer_than_ranks_are_refused() -> None:
    placement = replace(PLACEMENT, ranks=OneRank(Shard(0, 8), divide_by_expert))
    with pytest.raises(ModelError, match="7 experts are too few for 8 ranks; divide them by tensor"):
        build_model(replace(MIXTURE, num_heads=8, num_kv_heads=8), placement)


def test_ranks_read_a_checkpoint_with_a_matrix_per_expert() -> None:
    tensors = drawn_checkpoint(MIXTURE)
    single = stored_by_expert(tensors)
    assert single.keys() != tensors.keys()
    for found in run_ranks(
        2, lambda ranks: (logits(MIXTURE, single, ranks), logits(MIXTURE, tensors, ranks))
    ):
        assert torch.equal(torch.cat(found[0]), torch.cat(found[1]))


@pytest.mark.parametrize("divide", [divide_by_tensor, divide_by_expert])
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_hold_all_of_a_model_and_no_more_than_their_share(size: int, divide: DivideExperts) -> None:
    """Only norms, routers and KV heads that outnumbered ranks share are on several ranks."""
    config = replace(MIXTURE, num_kv_heads=4)
    whole = sum(piece.into.numel() for piece in build_model(config, PLACEMENT).pieces())
    counts: dict[str, Tensor] = {}
    for rank in range(size):
        placement = Placement(torch.float32, CPU, OneRank(Shard(rank, size), divide))
        model, held = build_model(config, placement), 0
        for piece in model.pieces():
            if piece.elsewhere:
                continue
            counts.setdefault(piece.name, torch.zeros(piece.whole))[piece.block] += 1
            held += piece.into.numel()
        assert held < 1.2 * whole / size
    shared = {name for name, count in counts.items() if (count != 1).any()}
    assert all((counts[name] == size).all() for name in shared)
    assert all("norm" in name or ".gate." in name or "gate.weight" in name for name in shared), shared


@pytest.mark.parametrize("size", [2, 4])
def test_a_weight_format_cuts_its_scales_with_its_rows(size: int) -> None:
    """A product with divided inputs has the scales of whole rows, and its bias on one rank."""
    stored = Int8Weights(METHOD, ())
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "p.weight": torch.randint(-99, 99, (8, 16), generator=generator, dtype=torch.int8),
        "p.weight_scale": torch.rand(8, 1, generator=generator),
        "p.bias": torch.rand(8, generator=generator),
    }
    inputs, outputs = [], []
    for rank in range(size):
        made = Int8Format(stored, Placement(torch.float32, CPU, OneRank(Shard(rank, size))))
        rows = made.linear(16, {"p": HeadGroup(4, 2)}, bias=True)
        columns = made.linear(HeadGroup(8, 2), {"p": 8}, bias=True)
        for product in (rows, columns):
            for piece in product.pieces():
                fill_piece(piece, MemoryTensors(tensors))
        outputs.append(rows.dense())
        inputs.append(columns.dense())
        for product, reads in ((columns, rank == 0), (rows, True)):
            assert [not piece.elsewhere for piece in product.pieces() if piece.name == "p.bias"] == [reads]
    whole = tensors["p.weight"].float() * tensors["p.weight_scale"]
    assert torch.equal(torch.cat(outputs), whole)
    assert torch.equal(torch.cat(inputs, dim=1), whole)


def test_adjacent_rows_of_a_tensor_are_one_read() -> None:
    heads = HeadGroup(4, 3)
    parts, columns = runs_of("t", heads, heads), Columns(5, 0, 5)
    (one,) = rank_blocks(parts, columns, Shard())
    assert (one.begin, one.rows, one.whole) == (0, 24, 24)
    assert [(block.begin, block.rows) for block in rank_blocks(parts, columns, Shard(1, 2))] == [
        (6, 6),
        (18, 6),
    ]


@pytest.mark.parametrize(
    ("config", "size", "said"),
    [
        (CONFIG, 3, "q_proj|self_attn: 4 heads cannot be divided among 3 ranks; use 1 or 2 or 4 or 8 ranks"),
        (CONFIG, 8, "o_proj: 4 heads cannot be divided evenly among 8 ranks; use 1 or 2 or 4 ranks"),
        (
            replace(CONFIG, intermediate_size=49),
            2,
            "49 heads cannot be divided (evenly )?among 2 ranks; use 1 rank$",
        ),
    ],
)
def test_what_cannot_be_divided_is_refused(config: ModelConfig, size: int, said: str) -> None:
    placement = Placement(torch.float32, CPU, OneRank(Shard(0, size)))
    with pytest.raises(ModelError, match=said):
        build_model(config, placement)


def test_a_format_declares_parts_for_one_rank_as_they_are() -> None:
    """The bias of a product stays, and its rows are read whole."""
    product = DenseFormat(PLACEMENT).linear(HeadGroup(4, 2), {"p": 6}, bias=True)
    assert [(piece.name, piece.is_whole) for piece in product.pieces()] == [
        ("p.weight", True),
        ("p.bias", True),
    ]


def test_vision_towers_are_on_every_rank() -> None:
    config = ModelConfig.load(TINY_VISION)
    assert isinstance(config.vision, LlavaVision)
    placement = replace(PLACEMENT, ranks=OneRank(Shard(1, 2)))
    whole = LlavaPart(config.vision, config.hidden_size, PLACEMENT)
    part = LlavaPart(config.vision, config.hidden_size, placement)
    shapes = [each.shape for each in whole.parameters()]
    assert shapes
    assert [each.shape for each in part.parameters()] == shapes
