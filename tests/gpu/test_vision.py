"""The vision part and the merging of its rows on a GPU, compared with the CPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from common.checkpoint.model_config import ModelConfig
from common.engine.attention.segments import attend_by_length, attend_within, segments_of
from common.engine.forward.model_runner import load_model
from common.engine.layers.placement import Placement
from common.engine.models.llava import LlavaPart
from common.engine.models.qwen_vl import QwenPart
from common.engine.models.vision_part import Pixels
from common.messages.generation import ImageSpan
from prefill_node.graphs.backends.choice import prompt_backend
from prefill_node.graphs.image_encoder import EncoderGraphs, encoder_spec
from prefill_node.graphs.patch_encoder import PatchEncoderGraphs, patch_spec
from prefill_node.pixel_reader import load_pixel_reader
from prefill_node.prompt_images import PendingImage, PromptImages, RowCache
from prefill_node.step_plan import PlannedChunk
from prefill_node.vision import MergedEmbeds, VisionEmbeds
from prefill_node.vision_stage import load_vision
from tests.fakes.qwen_vl import as_png, build, picture, processed, save
from tests.fakes.vision import one_prompt
from tests.fakes.waiting_for_device import waits_are_errors

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(240),
]
MODEL = Path(__file__).parents[2] / "deploy" / "tiny_models" / "tiny-vision"
DEVICE = torch.device("cuda")


def merged(dtype: torch.dtype, device: torch.device) -> tuple[MergedEmbeds, torch.Tensor]:
    """Return the inputs of target and draft for 5 + 16 + 4 tokens in one chunk that is not the prompt's last."""
    placement = Placement(dtype, device)
    model, config = load_model(MODEL, str(dtype).removeprefix("torch."), device)
    part = load_vision(MODEL, config, placement)
    image = PendingImage(
        ImageSpan(5, 16, bytes(32)),
        Pixels(torch.rand(3, 32, 32, generator=torch.Generator().manual_seed(1)), 1, 16),
    )
    second = PendingImage(
        ImageSpan(25, 16, b"x" * 32),
        Pixels(torch.rand(3, 32, 32, generator=torch.Generator().manual_seed(2)), 1, 16),
    )
    keys = np.arange(10, 60)
    spans, prompts = (image.span, second.span), PromptImages()
    prompts.add(1, (image, second))
    chunks = [PlannedChunk(key=1, start=0, end=25, ids=keys[:26].tobytes(), pages=(1,), images=spans)]
    batch = one_prompt(25)
    batch.input_ids = torch.from_numpy(keys[:25]).to(device)
    batch.query_start = batch.query_start.to(device)
    found = VisionEmbeds(model.embed, part, RowCache(1 << 20), prompts)(chunks, batch)
    assert found is not None
    return found, found.rotated(batch, torch.from_numpy(keys[1:26]).to(device))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_images_of_any_size_without_a_wait_for_the_device(dtype: torch.dtype, tmp_path: Path) -> None:
    """Qwen2.5-VL's tower is compared with transformers': windows that are full and cut, several images at once."""
    model = build()
    config = ModelConfig.load(save(model, tmp_path))
    assert config.vision is not None
    read = load_pixel_reader(tmp_path, config.vision, 1_000_000)
    pictures = [picture(*size) for size in ((40, 24), (9, 9), (16, 16), (48, 40))]
    images = [read(as_png(each)) for each in pictures]
    with torch.inference_mode():
        wanted = model.model.get_image_features(*processed(pictures)).pooler_output
    part = load_vision(tmp_path, config, Placement(dtype, DEVICE))
    part(images)  # chooses kernels and allocates pinned memory
    torch.cuda.synchronize()
    with waits_are_errors():
        found = part(images)
    tolerance = 1e-3 if dtype is torch.float32 else 0.05
    for rows, expected in zip(found, wanted, strict=True):
        assert rows.flatten(0, 1).shape == expected.shape
        assert (rows.flatten(0, 1).float().cpu() - expected).norm() / expected.norm() < tolerance


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("lengths", [(64,) * 9, (64, 64, 16, 32, 8, 4), (577,), (1, 700, 3)])
@torch.inference_mode()
def test_runs_of_rows_in_one_launch(lengths: tuple[int, ...], dtype: torch.dtype) -> None:
    """Heads have 80 values, as in the published tower; queries, keys and values are adjacent."""
    generator = torch.Generator(DEVICE).manual_seed(1)
    qkv = torch.randn(sum(lengths), 3, 16, 80, device=DEVICE, dtype=dtype, generator=generator)
    segments = segments_of(lengths, torch.tensor([0, *lengths], device=DEVICE).cumsum(0).int())
    query, key, value = qkv.unbind(1)
    found = attend_within(query, key, value, segments)
    wanted = attend_by_length(query.float(), key.float(), value.float(), lengths)
    assert found.is_contiguous()
    assert (found.float() - wanted).norm() / wanted.norm() < 0.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_images_of_one_size_replay_the_rows_of_the_eager_tower(dtype: torch.dtype) -> None:
    """Any number of images replays, with poisoned padding, without a wait for the device."""
    part = load_vision(MODEL, ModelConfig.load(MODEL), Placement(dtype, DEVICE))
    assert isinstance(part, LlavaPart)
    spec = encoder_spec((1, 2, 4), part.config.tokens_per_image)
    encoder = EncoderGraphs(part, spec, prompt_backend("full", DEVICE), poisoned=True)
    encoder.graphs.capture()
    assert not any(row.error for row in encoder.graphs.rows)
    generator = torch.Generator().manual_seed(1)
    tolerance = 1e-3 if dtype is torch.float32 else 0.05
    for count in (1, 3, 2, 4, 1, 5):
        images = [Pixels(torch.rand(3, 32, 32, generator=generator), 1, 16) for _ in range(count)]
        wanted = torch.cat(part(images)).clone()
        encoder(images)  # allocates pinned memory and gives the graph other images
        torch.cuda.synchronize()
        with waits_are_errors():
            found = torch.cat(encoder(images))
        assert (found - wanted).float().norm() / wanted.float().norm() < tolerance
    totals = encoder.graphs.totals()
    assert (totals.replays, totals.fallbacks, totals.unused) == (10, {"too_large": 2}, 0)


def test_images_of_any_size_replay_the_rows_of_the_eager_tower(tmp_path: Path) -> None:
    """The device locates windows and images; padding is poisoned."""
    config = ModelConfig.load(save(build(), tmp_path))
    part = load_vision(tmp_path, config, Placement(torch.bfloat16, DEVICE))
    assert isinstance(part, QwenPart)
    encoder = PatchEncoderGraphs(part, patch_spec((4, 16, 32)), prompt_backend("full", DEVICE), poisoned=True)
    encoder.graphs.capture()
    assert not any(row.error for row in encoder.graphs.rows)
    generator = torch.Generator().manual_seed(1)
    batches = (((2, 2),), ((4, 8),), ((3, 5),), ((2, 2), (1, 1), (2, 4)), ((4, 6),), ((6, 6),))
    for grids in batches:
        images = [
            Pixels(
                torch.randint(256, (8 * rows, 8 * columns, 3), dtype=torch.uint8, generator=generator),
                rows,
                columns,
            )
            for rows, columns in grids
        ]
        wanted = part(images)
        encoder(images)  # allocates pinned memory
        torch.cuda.synchronize()
        with waits_are_errors():
            found = encoder(images)
        for rows, expected in zip(found, wanted, strict=True):
            assert rows.shape == expected.shape
            assert (rows - expected).float().norm() / expected.float().norm() < 0.05
    totals = encoder.graphs.totals()
    assert (totals.replays, totals.fallbacks, totals.unused) == (10, {"too_large": 2}, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merged_embeddings_equal_those_of_the_cpu(dtype: torch.dtype) -> None:
    """Rows C2 to C4: this chunk ends just before an image row."""
    rows, ahead = merged(torch.float32, torch.device("cpu"))
    # otherwise CLIP's convolution has 10-bit mantissas
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        on_gpu, ahead_on_gpu = merged(dtype, DEVICE)
    tolerance = 1e-3 if dtype is torch.float32 else 0.05
    for wanted, found in ((rows.rows, on_gpu.rows), (ahead, ahead_on_gpu)):
        assert found.dtype is dtype
        difference = (found.float().cpu() - wanted).norm() / wanted.norm()
        assert difference < tolerance
    assert torch.equal(ahead_on_gpu[:-1], on_gpu.rows[1:])
    image = on_gpu.images[0][1]
    assert image.rows is not None
    assert torch.equal(ahead_on_gpu[-1], image.rows[0])
