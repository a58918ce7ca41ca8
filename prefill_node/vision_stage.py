"""The vision stage of a prefill node: the intake of images, and their embeddings in a step. No-ops for text models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from common.checkpoint.model_config import ModelConfig
from common.engine.graphs.node_graphs import NodeGraphs
from common.engine.graphs.rules import PhaseSwitch
from common.engine.layers.placement import Placement
from common.engine.models.causal_lm import CausalLM
from common.engine.models.vision_part import LoadedVisionPart
from common.ipc import Dealer
from common.observability.logs import Log
from prefill_node.graphs import prompt_graphs
from prefill_node.image_intake import ImageIntake
from prefill_node.images import Images, NoImages
from prefill_node.pixel_reader import load_pixel_reader
from prefill_node.prompt_images import PromptImages, RowCache
from prefill_node.vision import GivenEmbeds, PromptEmbeds, TextEmbeds, VisionEmbeds
from prefill_node.vision_table import EncoderForward, vision_family


@dataclass(frozen=True, slots=True)
class VisionStage:
    """The image intake of the node and the embeddings of its step."""

    images: Images
    embeds: PromptEmbeds
    # graphs of the encoder in `embeds`, not captured yet
    graphs: Sequence[NodeGraphs[EncoderForward]] = ()


def load_vision_stage(
    path: Path,
    model: CausalLM,
    placement: Placement,
    connect: Callable[[], Sequence[Dealer]],
    cache_bytes: int,
    max_pixels: int,
    log: Log,
    give: Callable[[Tensor], object] = lambda rows: None,
) -> Callable[[PhaseSwitch], VisionStage]:
    """Load the vision part of the model in `path`, if it has one. Raises ModelError.

    The returned function builds the stage with the configured graphs; it is called once for a trial and once to serve.

    Args:
        connect: opens the image sockets, one to each router.
        give: hands the rows of an image to the other ranks of the node.
    """
    vision = model.config.vision
    if vision is None:
        stage = VisionStage(NoImages(), TextEmbeds())
        return lambda wanted: stage
    reader = load_pixel_reader(path, vision, max_pixels)
    part = load_vision(path, model.config, placement)
    cache, prompts = RowCache(cache_bytes), PromptImages()
    intake = ImageIntake(connect(), reader, cache, prompts, log)

    def build(wanted: PhaseSwitch) -> VisionStage:
        encoder = prompt_graphs.encoder_graphs(part, wanted)
        embeds = VisionEmbeds(model.embed, encoder.forward, cache, prompts, give)
        return VisionStage(intake, embeds, (encoder,))

    return build


def given_stage(model: CausalLM, take: Callable[[int], Tensor]) -> VisionStage:
    """Return the stage of a rank to which rank 0 gives the rows of images; `take` as in GivenEmbeds."""
    embeds = TextEmbeds() if model.config.vision is None else GivenEmbeds(model.embed, take)
    return VisionStage(NoImages(), embeds)


def load_vision(path: Path, config: ModelConfig, placement: Placement) -> LoadedVisionPart:
    """Load the vision part of a model that has one. Raises ModelError."""
    assert config.vision is not None
    return vision_family(config.vision.family).load(path, config, placement)
