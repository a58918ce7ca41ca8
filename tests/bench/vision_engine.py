"""Prompts with one new image, without sockets: the encoder, and the first token after it, graphs on and off.

    python -m tests.bench.vision_engine [--json FILE] [--text 64 448 1472]

The language model is the constructed 8B shape. Towers have random weights: LLaVA-1.5's (CLIP ViT-L/14 at 336 pixels,
576 tokens) and Qwen2.5-VL's (32 blocks, windows of 112 pixels; here 672 x 672 pixels, 576 tokens); their graphs are
switched with those of prompts. Each prompt is compared with one of as many text tokens: the rest is encoder and
merging.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from common.checkpoint.llava_config import LlavaVision
from common.checkpoint.qwen_vl_config import CLIP_MEAN, CLIP_STD, QwenVision
from common.engine.graphs import node_graphs
from common.engine.graphs.rules import PhaseSwitch
from common.engine.layers.placement import Placement
from common.engine.models.llava import LlavaPart
from common.engine.models.qwen_vl import QwenPart
from common.engine.models.vision_part import Pixels, VisionPart
from common.messages.generation import ImageSpan
from common.observability.logs import Log
from deploy.tiny_models.constructed_shape import Shape
from prefill_node.graphs import prompt_graphs
from prefill_node.prompt_images import PendingImage, PromptImages, RowCache
from prefill_node.vision import VisionEmbeds
from tests.bench.engine import PAGE, WARM_UP, PrefillSteps, constructed_runner
from tests.bench.environment import describe

CLIP_L = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 336,
    "patch_size": 14,
    "projection_dim": 768,
}
QWEN = {
    "depth": 32,
    "hidden_size": 1280,
    "intermediate_size": 3420,
    "num_heads": 16,
    "window_size": 112,
    "fullatt_block_indexes": [7, 15, 23, 31],
}
BEFORE = 16  # text tokens before the image
REPEATS = 9


@dataclass(frozen=True)
class Row:
    """Milliseconds from the call to a token that Python can read, medians."""

    tower: str
    graphs: str
    image_tokens: int
    text_tokens: int
    ms: float
    text_alone_ms: float  # a text prompt of the same length
    encoder_ms: float  # by itself, from pixels on the host to finished rows


def llava(hidden: int, placement: Placement) -> tuple[LlavaPart | QwenPart, Pixels]:
    vision = LlavaVision(
        architecture="LlavaForConditionalGeneration",
        tower="clip_vision_model",
        tower_options=json.dumps(CLIP_L),
        image_token_id=0,
        tokens_per_image=576,
        image_size=336,
        feature_layers=(-2,),
        drop_first=True,
        projector_act="gelu",
        projector_bias=True,
    )
    return LlavaPart(vision, hidden, placement).eval(), Pixels(torch.rand(3, 336, 336), 1, 576)


def qwen(hidden: int, placement: Placement) -> tuple[LlavaPart | QwenPart, Pixels]:
    vision = QwenVision(
        architecture="Qwen2_5_VLForConditionalGeneration",
        tower_options=json.dumps(QWEN),
        image_token_id=0,
        video_token_id=1,
        patch_size=14,
        temporal_patch_size=2,
        merge_size=2,
        min_pixels=56 * 56,
        max_pixels=28 * 28 * 1280,
        rescale_factor=1 / 255,
        image_mean=CLIP_MEAN,
        image_std=CLIP_STD,
    )
    values = torch.randint(0, 256, (672, 672, 3), dtype=torch.uint8)
    return QwenPart(vision, hidden, placement).eval(), Pixels(values, 24, 24)


TOWERS = {"llava-1.5": llava, "qwen2.5-vl": qwen}


def new_images(pixels: Pixels, prompts: PromptImages) -> Iterator[tuple[ImageSpan, ...]]:
    """Yield the same image for prompt after prompt, as if it were a new one."""
    for number in itertools.count():
        span = ImageSpan(BEFORE, pixels.tokens, number.to_bytes(32, "big"), pixels.rows)
        prompts.add(0, [PendingImage(span, pixels)])
        yield (span,)


def encoder_of(part: LlavaPart | QwenPart, wanted: str) -> VisionPart:
    """Return the encoder as in a prefill node. Raises RuntimeError if a graph was not captured."""
    encoder = prompt_graphs.encoder_graphs(part, PhaseSwitch(wanted))
    node_graphs.capture(encoder, Log("bench"))
    if failed := [row.error for row in encoder.forward.graphs.rows if row.error]:
        raise RuntimeError(f"not captured: {failed}")
    return encoder.forward


def encoder_ms(part: VisionPart, pixels: Pixels, device: torch.device) -> float:
    times = []
    for _ in range(REPEATS + WARM_UP):
        started = time.perf_counter()
        part([pixels])
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return 1e3 * statistics.median(times[WARM_UP:])


def main() -> None:
    """Measure on one device."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument(
        "--text", type=int, nargs="+", default=[64, 448, 1472], help="text tokens around the image"
    )
    parser.add_argument("--towers", nargs="+", default=list(TOWERS), choices=TOWERS)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    assert min(options.text) > BEFORE, f"--text must be more than {BEFORE}"
    device = torch.device(options.device)
    chunk = 576 + max(options.text)
    runner = constructed_runner(Shape(layers=options.layers).config(), chunk + PAGE, device, chunk)
    placement = runner.model.placement
    hidden = runner.model.config.hidden_size
    rows = []
    print(
        f"{'tower':>12} {'graphs':>10} {'image':>6} {'text':>6} {'ms':>8} {'text alone':>10} {'encoder':>8}"
    )
    for name in options.towers:
        part, pixels = TOWERS[name](hidden, placement)
        for parameter in part.parameters():
            parameter.data.normal_(std=0.02)
        for wanted in ("breakable", "none"):
            encode = encoder_of(part, wanted)
            encoder = encoder_ms(encode, pixels, device)
            # nothing is cached: each prompt encodes its image anew
            cache, prompts = RowCache(0), PromptImages()
            embeds = VisionEmbeds(runner.model.embed, encode, cache, prompts)
            steps = PrefillSteps(runner, wanted, chunk, embeds)
            images = new_images(pixels, prompts)
            for text in options.text:
                tokens = pixels.tokens + text
                alone = steps.measure(tokens, REPEATS)[0]
                ms = steps.measure(tokens, REPEATS, images.__next__)[0]
                rows.append(Row(name, wanted, pixels.tokens, text, ms, alone, encoder))
                print(
                    f"{name:>12} {wanted:>10} {pixels.tokens:6d} {text:6d} {ms:8.2f} {alone:10.2f} {encoder:8.2f}",
                    flush=True,
                )
            del steps, embeds, encode  # frees graphs and their memory
            gc.collect()
    if options.json:
        report = {
            "environment": describe(),
            "options": vars(options),
            "rows": [asdict(row) for row in rows],
        }
        options.json.write_text(json.dumps(report, indent=2, default=str) + "\n")


if __name__ == "__main__":
    main()
