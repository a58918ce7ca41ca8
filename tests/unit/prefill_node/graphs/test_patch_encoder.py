"""Images of any size under graphs: replays are compared with the eager tower, with poisoned padding."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from common.checkpoint.qwen_vl_config import CLIP_MEAN, CLIP_STD, QwenVision
from common.engine.graphs import node_graphs
from common.engine.graphs.backends.full import FullGraphs
from common.engine.graphs.backends.tape import TapeRecorder
from common.engine.graphs.rules import RULES, PhaseSwitch
from common.engine.layers.placement import Placement
from common.engine.models.learned_tower import LearnedTower
from common.engine.models.qwen_vl import QwenPart
from common.engine.models.vision_part import Pixels
from common.observability.logs import Log
from prefill_node.graphs import prompt_graphs
from prefill_node.graphs.patch_encoder import PatchEncoderGraphs, PatchProgram, patch_spec

CPU = Placement(torch.float32, torch.device("cpu"))
TOWER = {
    "depth": 3,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_heads": 2,
    "window_size": 16,
    "fullatt_block_indexes": [1],
}


LEARNED = {"num_position_embeddings": 25, "learned": True}


@pytest.fixture(scope="module", params=[{}, LEARNED], ids=["windows", "learned"])
def part(request: pytest.FixtureRequest) -> QwenPart:
    vision = QwenVision(
        "", json.dumps({**TOWER, **request.param}), 0, 1, 4, 2, 2, 64, 64 * 64, 1 / 255, CLIP_MEAN, CLIP_STD
    )
    made = QwenPart(vision, 24, CPU).eval()
    generator = torch.Generator().manual_seed(1)
    for parameter in made.parameters():
        parameter.normal_(std=0.3, generator=generator)
    return made


def pictures(seed: int, *grids: tuple[int, int]) -> list[Pixels]:
    generator = torch.Generator().manual_seed(seed)
    return [
        Pixels(
            torch.randint(256, (8 * rows, 8 * columns, 3), dtype=torch.uint8, generator=generator),
            rows,
            columns,
        )
        for rows, columns in grids
    ]


def test_a_replay_gives_the_rows_of_the_eager_tower(part: QwenPart) -> None:
    """Sizes and numbers of images change between replays of a graph; padding affects nothing."""
    spec = patch_spec((4, 24))
    assert [(shape.tokens, shape.requests) for shape in spec.shapes] == [(4, 1), (24, 6)]
    encoder = PatchEncoderGraphs(part, spec, FullGraphs(TapeRecorder()), poisoned=True)
    encoder.graphs.capture()
    assert [row.error for row in encoder.graphs.rows] == ["", ""]
    for seed, grids in enumerate(
        (
            ((2, 2),),
            ((4, 6),),
            ((3, 5),),
            ((2, 2), (1, 1), (2, 4)),
            ((1, 1),),
            ((5, 5),),
            ((1, 3), (1, 3), (1, 3), (1, 3)),
        )
    ):
        images = pictures(seed, *grids)
        program = encoder.graphs.program
        assert isinstance(program, PatchProgram)
        for runs in (program.windows, program.images):
            runs.fill_(torch.iinfo(runs.dtype).max)  # stale values: all of them must be rewritten
        for rows, wanted, grid in zip(encoder(images), part(images), grids, strict=True):
            assert rows.shape == (*grid, 24)
            torch.testing.assert_close(rows, wanted, atol=1e-5, rtol=1e-5)
    totals = encoder.graphs.totals()
    live, padded = 4 + 24 + 15 + 13 + 1, 0 + 0 + 9 + 11 + 3
    if isinstance(part.tower, LearnedTower):  # four images are four windows
        assert (totals.replays, totals.fallbacks) == (6, {"too_large": 1}), "one batch has too many tokens"
        live, padded = live + 12, padded + 12
    else:
        assert (totals.replays, totals.fallbacks) == (5, {"too_large": 2}), (
            "one batch has too many tokens, one too many windows"
        )
    assert (totals.live_tokens, totals.padded_tokens) == (live, padded)


def test_it_is_captured_where_attention_needs_no_host(
    part: QwenPart, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = pictures(0, (2, 3))
    none = prompt_graphs.encoder_graphs(part, PhaseSwitch("none"))
    node_graphs.capture(none, Log("test"))
    torch.testing.assert_close(none.forward(images)[0], part(images)[0], atol=0, rtol=0)
    assert none.forward.graphs.totals().fallbacks == {"no_graphs": 1}
    taped = prompt_graphs.encoder_graphs(part, PhaseSwitch("full"))
    shapes = taped.forward.graphs.spec.shapes
    assert not taped.forward.graphs.inputs.poisoned
    poisoned = prompt_graphs.encoder_graphs(part, PhaseSwitch("full", poisoned=True))
    assert poisoned.forward.graphs.inputs.poisoned
    assert (taped.decision.backend, len(shapes), shapes[-1].tokens) == ("full", 22, 1024)
    assert any(shape.tokens == 576 for shape in shapes), "672 x 672 pixels need no padding"
    on_gpu = Placement(torch.float32, torch.device("cuda"))
    monkeypatch.setattr(part, "placement", on_gpu)
    told = prompt_graphs.encoder_graphs
    with monkeypatch.context() as patched:
        patched.setattr(prompt_graphs, "prompt_backend", lambda *given: FullGraphs(TapeRecorder()))
        patched.setattr(
            prompt_graphs, "PatchEncoderGraphs", lambda part, spec, *rest: SimpleNamespace(spec=spec)
        )
        refused: Any = told(part, PhaseSwitch("full"))
        assert (refused.decision.backend, refused.forward.spec.shapes) == ("none", ())
        assert refused.decision.reasons == (f"multimodal: {RULES[1].reason}",)
        enforced = told(part, PhaseSwitch("full", enforce=True)).decision
        assert (enforced.backend, enforced.reasons) == ("full", ("enforced",))
        monkeypatch.setattr(part, "placement", replace(on_gpu, dtype=torch.bfloat16))
        assert told(part, PhaseSwitch("full")).decision.backend == "full"
