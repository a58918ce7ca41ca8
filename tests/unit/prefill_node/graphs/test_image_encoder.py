"""Images of one size under graphs: replays are compared with the eager tower, with poisoned padding."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from common.checkpoint.llava_config import LlavaVision
from common.engine.encoder_sizes import ENCODER_BATCH, largest_batch
from common.engine.graphs import node_graphs
from common.engine.graphs.backends.base import CaptureError
from common.engine.graphs.backends.full import FullGraphs
from common.engine.graphs.backends.tape import TapeRecorder
from common.engine.graphs.ladders import image_buckets
from common.engine.graphs.report import table
from common.engine.graphs.rules import PhaseSwitch
from common.engine.layers.placement import Placement
from common.engine.models.llava import LlavaPart
from common.engine.models.vision_part import Pixels
from common.observability.logs import Log
from prefill_node.graphs import prompt_graphs
from prefill_node.graphs.image_encoder import EncoderGraphs, encoder_spec

CPU = Placement(torch.float32, torch.device("cpu"))
TOWER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
}


@pytest.fixture(scope="module", params=["clip_vision_model", "siglip_vision_model"])
def part(request: pytest.FixtureRequest) -> LlavaPart:
    clip = request.param == "clip_vision_model"
    features = (-2,) if clip else (-1,)
    vision = LlavaVision("", request.param, json.dumps(TOWER), 0, 4, 8, features, clip, "gelu", True)
    torch.manual_seed(1)
    made = LlavaPart(vision, 16, CPU).eval()
    for parameter in made.parameters():
        parameter.data.normal_(std=0.3)
    return made


def pictures(count: int, seed: int) -> list[Pixels]:
    values = torch.rand(count, 3, 8, 8, generator=torch.Generator().manual_seed(seed))
    return [Pixels(each, 1, 4) for each in values]


def test_a_replay_gives_the_rows_of_the_eager_tower(part: LlavaPart) -> None:
    """Any number of images replays, one batch after another in the same graphs; padding images affect nothing."""
    encoder = EncoderGraphs(part, encoder_spec((1, 2, 4), 4), FullGraphs(TapeRecorder()), poisoned=True)
    encoder.graphs.capture()
    assert [(row.phase, row.tokens, row.requests, row.error) for row in encoder.graphs.rows] == [
        ("encoder", 16, 4, ""),
        ("encoder", 8, 2, ""),
        ("encoder", 4, 1, ""),
    ]
    assert "16 / 4" in table(encoder.graphs.rows)
    for seed, count in enumerate((1, 3, 2, 4, 1, 5)):
        images = pictures(count, seed)
        rows, wanted = encoder(images), part(images)
        assert [each.shape for each in rows] == [(1, 4, 16)] * count
        torch.testing.assert_close(torch.cat(rows), torch.cat(wanted), atol=1e-5, rtol=1e-5)
    totals = encoder.graphs.totals()
    assert (totals.replays, totals.fallbacks, totals.unused) == (5, {"too_large": 1}, 0)
    assert (totals.live_tokens, totals.padded_tokens) == (44, 4)


def test_what_the_config_says_of_prompts_holds_for_images(part: LlavaPart) -> None:
    """Row A10: on a CPU `auto` means no graphs, and the tape is for tests; what is not captured is counted as such."""
    images = pictures(1, 0)
    for wanted in ("auto", "none"):
        eager = prompt_graphs.encoder_graphs(part, PhaseSwitch(wanted))
        node_graphs.capture(eager, Log("test"))
        torch.testing.assert_close(eager.forward(images)[0], part(images)[0], atol=0, rtol=0)
        assert eager.forward.graphs.totals().fallbacks == {"no_graphs": 1}
        assert node_graphs.trial(lambda: [eager], lambda: 7) == 0  # noqa: B023
    taped = prompt_graphs.encoder_graphs(part, PhaseSwitch("breakable"))
    assert not taped.forward.graphs.inputs.poisoned
    poisoned = prompt_graphs.encoder_graphs(part, PhaseSwitch("breakable", poisoned=True))
    assert poisoned.forward.graphs.inputs.poisoned
    node_graphs.capture(taped, Log("test"))
    told = node_graphs.report(taped)
    assert (told.phase, told.backend, told.unit) == ("encoder", "full", "images of 4 tokens")
    assert (told.shapes, told.captured) == ((1, 2, 3, 4, 6, 8), 6)
    assert node_graphs.trial(lambda: [taped], lambda: 7) == 6 * node_graphs.GRAPH_BYTES


def test_a_failed_capture_is_reported_and_runs_eagerly(
    part: LlavaPart, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(TapeRecorder):
        def end(self) -> Any:
            raise CaptureError("as some driver says")

    encoder = EncoderGraphs(part, encoder_spec((1,), 4), FullGraphs(Broken()))
    encoder.graphs.capture()
    assert "as some driver says" in encoder.graphs.rows[0].error
    images = pictures(1, 3)
    torch.testing.assert_close(encoder(images)[0], part(images)[0], atol=0, rtol=0)
    assert encoder.graphs.totals().fallbacks == {"capture_failed": 1}


def test_numbers_of_images_end_with_the_largest_batch_of_a_node() -> None:
    assert image_buckets(ENCODER_BATCH) == (1, 2, 3, 4, 6, 8)
    assert image_buckets(largest_batch(3000)) == (1, 2, 3, 4, 5)
    assert image_buckets(largest_batch(20_000)) == (1,)
