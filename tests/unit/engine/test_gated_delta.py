"""The gated delta mixer equals transformers' layer: prompts in chunks, windows of decode steps, both row orders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from common.checkpoint.families import LayerKind
from common.checkpoint.gated_delta_config import GatedDeltaConfig
from common.engine.attention.paged import PagedAttention
from common.engine.formats.dense import DenseFormat
from common.engine.forward.batch import BatchState, ForwardBatch, ForwardMode
from common.engine.layers.activations import Activations
from common.engine.layers.gated_delta import GatedDelta
from common.engine.layers.norm import RmsNorm
from common.engine.layers.placement import Placement
from common.engine.state.pool import KvPool
from common.engine.state.state_rows import StateRows, WindowShape
from common.kv_cache.layer_kinds import prompt_grid, window_widths
from common.kv_cache.pool_layout import PoolLayout
from common.kv_cache.pool_spec import pool_spec
from tests.fakes.tiny_model import CONFIG, PLACEMENT

SHAPE = GatedDeltaConfig(key_heads=2, value_heads=6, key_dim=8, value_dim=12, grouped_rows=False)
HIDDEN, SLOTS, ROWS = CONFIG.hidden_size, 5, 4
TOLERANCE: dict[str, Any] = {"atol": 1e-4, "rtol": 1e-4}


def their_layer(grouped: bool, seed: int = 0) -> Any:
    """Make transformers' layer with random parameters, each of which matters."""
    family, layer = (
        ("Qwen3Next", Qwen3NextGatedDeltaNet) if grouped else ("Qwen3_5Text", Qwen3_5GatedDeltaNet)
    )
    config = getattr(transformers, f"{family}Config")(
        hidden_size=HIDDEN,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
        rms_norm_eps=CONFIG.rms_norm_eps,
        linear_num_key_heads=SHAPE.key_heads,
        linear_num_value_heads=SHAPE.value_heads,
        linear_key_head_dim=SHAPE.key_dim,
        linear_value_head_dim=SHAPE.value_dim,
    )
    made = layer(config, 0).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            parameter.normal_(std=0.25, generator=generator)
            if name in ("norm.weight", "dt_bias"):
                parameter.add_(1.0)
    return made


@torch.no_grad()
def their_output(layer: Any, x: Tensor) -> Tensor:
    """[n, H] for the whole text x [n, H]."""
    out: Tensor = layer(x[None])[0]
    return out


def our_layer(theirs: Any, grouped: bool) -> GatedDelta:
    config = replace(
        CONFIG,
        num_layers=1,
        layer_kinds=(LayerKind("gated_delta"),),
        gated_delta=replace(SHAPE, grouped_rows=grouped),
    )
    layer = GatedDelta("model.layers.0", config, 0, DenseFormat(PLACEMENT))
    tensors = dict(theirs.named_parameters())
    read: dict[str, int] = dict.fromkeys(tensors, 0)
    for piece in layer.pieces():
        name = piece.name.removeprefix("model.layers.0.linear_attn.")
        assert piece.whole == tuple(tensors[name].shape)
        piece.into.copy_(tensors[name][piece.block].detach())
        read[name] += piece.into.numel()
    assert read == {name: tensor.numel() for name, tensor in tensors.items()}
    return layer


class Rig:
    """Our layer over a pool of states and a window of `tokens` tokens per row; slots and rows start with garbage."""

    def __init__(self, layer: GatedDelta, grouped: bool = False, tokens: int = 1) -> None:
        self.layer = layer
        config = replace(CONFIG, num_layers=1, layer_kinds=(LayerKind("gated_delta"),), gated_delta=SHAPE)
        spec = pool_spec(config, None, 16, "float32")
        layout = PoolLayout(fingerprint="rig", spec=spec, num_pages=2, num_slots=SLOTS)
        self.pool = KvPool(layout, "target", torch.zeros(layout.total_bytes, dtype=torch.uint8))
        for plane in self.pool.planes(0).values():
            plane[1:] = torch.nan
        self.attention = PagedAttention(self.pool, (None,))
        self.rows = StateRows.allocate(ROWS, WindowShape(window_widths(config), tokens), PLACEMENT.device)
        for window in self.rows.windows.values():
            window[1:] = torch.nan

    def __call__(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """[T, H] for x [T, H]; both planes keep padding zero."""
        self.attention.plan(batch)
        norm = RmsNorm("none", HIDDEN, 1e-6, PLACEMENT)
        norm.weight.zero_()
        angles = torch.empty(0), torch.empty(0)
        with torch.inference_mode():
            out = self.layer.add_norm(
                Activations(x), torch.zeros(len(x), HIDDEN), norm, angles, self.attention
            )[1]
        kept = (*self.pool.planes(0).values(), *self.rows.windows.values())
        assert not any(plane[0].any() for plane in kept), "padding holds values"
        return out

    def extend(
        self, parts: Sequence[Tensor], slots: Sequence[int], done: Sequence[int], padding: int = 0
    ) -> list[Tensor]:
        """Compute the next tokens of several texts, of which `done` tokens are in the state."""
        lengths = [len(part) for part in parts]
        x = torch.cat([*parts, torch.full((padding, HIDDEN), torch.nan)])
        starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
        totals = [before + new for before, new in zip(done, lengths, strict=True)]
        batch = forward_batch(ForwardMode.EXTEND, len(x), starts, totals)
        batch.state = BatchState(torch.tensor(slots))
        out = self(x, batch)
        assert not out[sum(lengths) :].any()
        return list(out[: sum(lengths)].split(lengths))

    def step(self, parts: Sequence[Tensor], rows: Sequence[int], done: Sequence[int]) -> list[Tensor]:
        """Compute as many new tokens of each row, the accepted text of which has `done` tokens."""
        count = len(parts[0])
        starts = torch.arange(len(parts) + 1, dtype=torch.int32) * count
        batch = forward_batch(ForwardMode.VERIFY, count * len(parts), starts, [each + count for each in done])
        batch.state = self.rows.open_window(torch.tensor(rows), torch.tensor(done))
        return list(self(torch.cat(list(parts)), batch).split(count))


def forward_batch(mode: ForwardMode, tokens: int, starts: Tensor, totals: Sequence[int]) -> ForwardBatch:
    zeros = torch.zeros(tokens, dtype=torch.int64)
    lengths = (starts[1:] - starts[:-1]).tolist()
    return ForwardBatch(
        mode=mode,
        input_ids=zeros,
        positions=zeros,
        kv_slots=zeros,
        page_table=torch.ones(len(totals), 1024, dtype=torch.int32),
        seq_lens=torch.tensor(totals, dtype=torch.int32),
        query_start=starts,
        logits_rows=zeros[:0],
        max_seq_len=max(totals),
        query_lens_host=tuple(lengths),
        seq_lens_host=tuple(totals),
    )


@pytest.fixture(scope="module", params=[False, True], ids=["qwen3.5", "qwen3-next"])
def layers(request: pytest.FixtureRequest) -> tuple[GatedDelta, Any]:
    theirs = their_layer(request.param)
    return our_layer(theirs, request.param), theirs


def text(tokens: int) -> Tensor:
    return torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(tokens))


@pytest.mark.parametrize("length", [1, 2, 3, 4, 63, 64, 65, 129])
def test_a_prompt_and_the_tokens_after_it(layers: tuple[GatedDelta, Any], length: int) -> None:
    """The state after the prompt is all that a decode step knows."""
    ours, theirs = layers
    x = text(length + 5)
    expected = their_output(theirs, x)
    assert expected.std() > 0.1
    rig = Rig(ours)
    found = rig.extend([x[:length]], [3], [0], padding=7)
    rig.rows.write_row(2, 3, length)
    for at in range(length, length + 5):
        found += rig.step([x[at : at + 1]], [2], [at])
    torch.testing.assert_close(torch.cat(found), expected, **TOLERANCE)


@pytest.mark.parametrize("cuts", [(64,), (128,), (64, 128), (1, 2, 3, 130), (63,), (65, 66), (4, 5)])
def test_a_prompt_cut_anywhere(layers: tuple[GatedDelta, Any], cuts: tuple[int, ...]) -> None:
    """On the grid of 64 as on prefill nodes, and off it, where results differ only by rounding."""
    ours, theirs = layers
    x, rig = text(140), Rig(ours)
    found = [rig.extend([x[a:b]], [1], [a])[0] for a, b in pairwise((0, *cuts, 140))]
    torch.testing.assert_close(torch.cat(found), their_output(theirs, x), **TOLERANCE)


def test_prompts_share_a_forward(layers: tuple[GatedDelta, Any]) -> None:
    """Some begin, some continue, one is empty padding; lengths around the size of a chunk."""
    ours, theirs = layers
    texts, rig = [text(n) for n in (70, 2, 200, 130)], Rig(ours)
    halves = [rig.extend([texts[2][:64], texts[3][:128]], [1, 4], [0, 0])]
    rest = rig.extend(
        [texts[0], texts[1], texts[2][64:], texts[3][128:], text(0)],
        [2, 3, 1, 4, 0],
        [0, 0, 64, 128, 0],
        padding=3,
    )
    found = [rest[0], rest[1], torch.cat([halves[0][0], rest[2]]), torch.cat([halves[0][1], rest[3]])]
    for ours_text, x in zip(found, texts, strict=True):
        torch.testing.assert_close(ours_text, their_output(theirs, x), **TOLERANCE)


@pytest.mark.parametrize("accepted", [0, 1, 2, 3, 4])
def test_a_window_folds_in_what_was_accepted(layers: tuple[GatedDelta, Any], accepted: int) -> None:
    """Row E5: rejected tokens leave no trace; rows of a batch accept different numbers; padding costs nothing."""
    ours, theirs = layers
    count, prompt = 4, 9
    wrong = text(100)
    x, y = text(prompt + 3 * count), text(prompt + 3 * count)[torch.arange(prompt + 3 * count).flip(0)]
    rig = Rig(ours, tokens=count)
    rig.extend([x[:prompt], y[:prompt]], [1, 2], [0, 0])
    rig.rows.write_row(3, 1, prompt)
    rig.rows.write_row(1, 2, prompt)
    taken = (accepted, count - accepted)
    windows = [
        torch.cat([each[prompt : prompt + n], wrong[: count - n]])
        for each, n in zip((x, y), taken, strict=True)
    ]
    rig.step([*windows, wrong[:count]], [3, 1, 0], [prompt, prompt, 0])
    done = [prompt + n for n in taken]
    parts = [each[at : at + count] for each, at in zip((x, y), done, strict=True)]
    found = rig.step([*parts, wrong[:count]], [3, 1, 0], [*done, 0])
    for each, part, at in zip((x, y), found, done):
        torch.testing.assert_close(part, their_output(theirs, each)[at : at + count], **TOLERANCE)


def test_a_narrower_step_after_a_wider_one(layers: tuple[GatedDelta, Any]) -> None:
    """Adaptive speculation: the windows are as wide as the widest step."""
    ours, theirs = layers
    x, rig = text(30), Rig(ours, tokens=4)
    found = rig.extend([x[:10]], [1], [0])
    rig.rows.write_row(1, 1, 10)
    at = 10
    for count in (4, 1, 3, 2, 4, 1):
        found += rig.step([x[at : at + count]], [1], [at])
        at += count
    torch.testing.assert_close(torch.cat(found), their_output(theirs, x[:at]), **TOLERANCE)


def test_prompts_are_cut_where_chunks_and_pages_end() -> None:
    config = replace(CONFIG, num_layers=1, layer_kinds=(LayerKind("gated_delta"),), gated_delta=SHAPE)
    assert [prompt_grid(config, size) for size in (1, 16, 64, 48, 128)] == [64, 64, 64, 192, 128]
    assert prompt_grid(CONFIG, 48) == 1


def test_float32_parameters_stay_in_a_model_of_16_bits() -> None:
    config = replace(CONFIG, layer_kinds=(LayerKind("gated_delta"),) * 2, gated_delta=SHAPE)
    half = Placement(torch.bfloat16, PLACEMENT.device)
    layer = GatedDelta("model.layers.0", config, 0, DenseFormat(half))
    wide = {
        piece.name.rpartition("linear_attn.")[2]
        for piece in layer.pieces()
        if piece.into.dtype == torch.float32
    }
    assert wide == {"A_log", "dt_bias", "norm.weight"}
