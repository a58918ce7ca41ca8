"""A family of vision parts is added by its config, its part and rows of tables; nothing else asks which one it is."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor

from common.checkpoint.model_config import ModelConfig
from common.checkpoint.vision_tower import TowerNames, TowerSize, VisionConfig
from common.engine.graphs.rules import PhaseSwitch
from common.engine.layers.placement import Placement
from common.engine.models.checkpoint_layout import checkpoint_layout
from common.engine.models.model_size import check_tower_size
from common.engine.models.vision_part import LoadedVisionPart, Pixels
from common.errors import ModelError
from common.node import encoder_memory
from prefill_node.graphs import prompt_graphs
from prefill_node.pixel_reader import load_pixel_reader
from prefill_node.vision_stage import load_vision
from prefill_node.vision_table import VISION_FAMILIES, VisionFamily
from tests.fakes.tiny_model import CONFIG

CPU = Placement(torch.float32, torch.device("cpu"))


@dataclass(frozen=True, slots=True)
class ToyVision:
    """One token per image: its average colour."""

    family: ClassVar[str] = "toy"
    names: ClassVar[TowerNames] = TowerNames("Toy", "eye.", "text.", "text_", ("eye.",))
    architecture: str = "ToyForConditionalGeneration"
    image_token_id: int = 5
    refused_token_ids: tuple[int, ...] = ()
    width: int = 3

    def grid(self, width: int, height: int) -> tuple[int, int]:
        return 1, 1

    def tower_size(self, hidden: int) -> TowerSize:
        return TowerSize(self.width * hidden, self.width, 0, 1)


class ToyPart:
    runs_on_device = True

    def __init__(self, config: VisionConfig, placement: Placement) -> None:
        self.config, self.placement = config, placement

    def __call__(self, images: Sequence[Pixels]) -> list[Tensor]:
        return [image.values.view(1, 1, 3) for image in images]

    def examples(self) -> Sequence[Sequence[Pixels]]:
        return ()


def load(path: Path, config: ModelConfig, placement: Placement) -> LoadedVisionPart:
    assert config.vision is not None
    return ToyPart(config.vision, placement)


def process(path: Path, vision: ToyVision) -> Any:
    return lambda image: Pixels(
        torch.tensor(image.resize((1, 1)).getpixel((0, 0))), *vision.grid(*image.size)
    )


def graphs(part: ToyPart, backend: object, captured: bool, poisoned: bool) -> Any:
    return SimpleNamespace(part=part, captured=captured, poisoned=poisoned)


TOY = VisionFamily(load, process, graphs)


@pytest.fixture(autouse=True)
def _added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(VISION_FAMILIES, "toy", f"{__name__}:TOY")
    rows = {**encoder_memory.OF_FAMILY, "toy": lambda vision, hidden, size: hidden * size}
    monkeypatch.setattr(encoder_memory, "OF_FAMILY", rows)


def test_its_record_makes_what_a_prefill_node_runs() -> None:
    config = replace(CONFIG, vision=ToyVision())
    buffer = io.BytesIO()
    Image.new("RGB", (9, 7), (10, 20, 30)).save(buffer, "png")
    pixels = load_pixel_reader(Path("m"), ToyVision(), 1000)(buffer.getvalue())
    part = load_vision(Path("m"), config, CPU)
    assert part([pixels])[0].tolist() == [[[10, 20, 30]]]
    made: Any = prompt_graphs.encoder_graphs(part, PhaseSwitch("full", poisoned=True))
    assert (made.forward.part, made.forward.captured, made.forward.poisoned) == (part, True, True)
    off: Any = prompt_graphs.encoder_graphs(part, PhaseSwitch("none"))
    assert not off.forward.captured


def test_its_config_says_what_is_checked_before_it_is_loaded(tmp_path: Path) -> None:
    config = replace(CONFIG, vision=ToyVision())
    save_file({"eye.weight": torch.zeros(3, 4)}, tmp_path / "model.safetensors")
    layout = checkpoint_layout(config, tmp_path)
    assert (layout.prefix, layout.head, layout.vision_prefixes) == ("text.", "text_", ("eye.",))
    check_tower_size(tmp_path, ToyVision(), 4)
    with pytest.raises(ModelError, match="hidden_size 9000000, intermediate_size 0 and 1 layers"):
        check_tower_size(tmp_path, ToyVision(width=9_000_000), 4)
    assert encoder_memory.encoder_bytes(ToyVision(), 4, torch.float32) == 16
    save_file({"other": torch.zeros(3)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"no tensor is called eye\.\* or .* of Toy checkpoints"):
        checkpoint_layout(config, tmp_path)
