"""The vision part and the merging of its rows on a GPU, against the same on the CPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from common.engine.layers.placement import Placement
from common.engine.model_runner import load_model
from common.engine.models.vision_part import Pixels
from common.messages.generation import ImageSpan, SamplingParams
from common.model_config import ModelConfig
from prefill_node.images import PromptImage, RowCache
from prefill_node.request import PrefillRequest
from prefill_node.scheduler import Chunk
from prefill_node.seeing import load_vision
from prefill_node.vision import MergedEmbeds, VisionEmbeds
from tests.fakes.qwen_vl import build, save
from tests.fakes.vision import one_prompt

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(240),
]
MODEL = Path(__file__).parents[2] / "deploy" / "models" / "tiny-vision"
DEVICE = torch.device("cuda")


def merged(dtype: torch.dtype, device: torch.device) -> tuple[MergedEmbeds, torch.Tensor]:
    """A prompt of 5 + 16 + 4 tokens in one chunk that is not its last: what the target and what the draft read."""
    placement = Placement(dtype, device)
    model, config = load_model(MODEL, str(dtype).removeprefix("torch."), device)
    part = load_vision(MODEL, config, placement)
    image = PromptImage(
        ImageSpan(5, 16, bytes(32)),
        Pixels(torch.rand(3, 32, 32, generator=torch.Generator().manual_seed(1)), 1, 16),
    )
    second = PromptImage(
        ImageSpan(25, 16, b"x" * 32),
        Pixels(torch.rand(3, 32, 32, generator=torch.Generator().manual_seed(2)), 1, 16),
    )
    keys = np.arange(10, 60)
    request = PrefillRequest(
        0, "", keys, 0, SamplingParams(max_tokens=1), "", 0.0, 0.0, images=(image, second)
    )
    chunks = [Chunk(request, 0, 25)]
    batch = one_prompt(25)
    batch.input_ids = torch.from_numpy(keys[:25]).to(device)
    batch.query_start = batch.query_start.to(device)
    found = VisionEmbeds(model.embed, part, RowCache(1 << 20))(chunks, batch)
    assert found is not None
    return found, found.rotated(batch, torch.from_numpy(keys[1:26]).to(device))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_images_of_any_size_without_a_wait_for_the_device(dtype: torch.dtype, tmp_path: Path) -> None:
    """Qwen2.5-VL's tower: windows that are full and cut, several images at once."""
    config = ModelConfig.load(save(build(), tmp_path))
    grids = [(3, 5), (1, 1), (2, 2), (4, 4)]
    images = [
        Pixels(torch.randint(256, (8 * rows, 8 * columns, 3), dtype=torch.uint8), rows, columns)
        for rows, columns in grids
    ]
    wanted = load_vision(tmp_path, config, Placement(torch.float32, torch.device("cpu")))(images)
    part = load_vision(tmp_path, config, Placement(dtype, DEVICE))
    part(images)  # kernels are chosen, pinned memory is there
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = part(images)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    tolerance = 1e-3 if dtype is torch.float32 else 0.05
    for rows, expected in zip(found, wanted, strict=True):
        assert rows.shape == expected.shape
        assert (rows.float().cpu() - expected).norm() / expected.norm() < tolerance


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merged_embeddings_equal_those_of_the_cpu(dtype: torch.dtype) -> None:
    """Rows C2 to C4: the tail of this chunk goes on with an image."""
    rows, ahead = merged(torch.float32, torch.device("cpu"))
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):  # else CLIP's convolution has 10 bits
        on_gpu, ahead_on_gpu = merged(dtype, DEVICE)
    tolerance = 1e-3 if dtype is torch.float32 else 0.05
    for wanted, found in ((rows.rows, on_gpu.rows), (ahead, ahead_on_gpu)):
        assert found.dtype is dtype
        difference = (found.float().cpu() - wanted).norm() / wanted.norm()
        assert difference < tolerance
    assert torch.equal(ahead_on_gpu[:-1], on_gpu.rows[1:])
    image = on_gpu.chunks[0].request.images[1]
    assert image.rows is not None
    assert torch.equal(ahead_on_gpu[-1], image.rows[0])
