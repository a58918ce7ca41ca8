"""Reads the vision part and the image processor of a Qwen2.5-VL checkpoint's config. No torch.

Images keep their proportions: each is resized to a whole number of merged patches within the processor's limits, so
its number of tokens follows from its size. The router and the prefill node use the same function. Source: arXiv
2502.13923; transformers `Qwen2VLImageProcessor`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from common.checkpoint import model_files
from common.checkpoint.json_fields import (
    MAX_HEADS,
    MAX_LAYERS,
    MAX_WIDTH,
    architecture_of,
    flag,
    number,
    optional_section,
    positive,
    section,
    shown,
    token_id,
    word,
)
from common.checkpoint.rope_config import SECTIONS, split_sections
from common.checkpoint.vision_tower import TowerNames, TowerSize
from common.errors import InvalidRequest, ModelError

ARCHITECTURES = ("Qwen2_5_VLForConditionalGeneration",)
MAX_RATIO = 200  # ratio of an image's longer side to its shorter one
MAX_IMAGE_TOKENS = 65_536
MAX_PATCH_SIZE, MAX_MERGE_SIZE, MAX_FRAMES = 64, 8, 8
MAX_PIXELS = 1 << 26  # per resized image
BICUBIC = 3  # Pillow's number
TOWER_DEFAULTS: Mapping[str, Any] = {  # keys that define the tower, with transformers' defaults
    "depth": 32,
    "hidden_size": 3584,
    "hidden_act": "silu",
    "intermediate_size": 3420,
    "num_heads": 16,
    "window_size": 112,
    "fullatt_block_indexes": (7, 15, 23, 31),
    "rope_parameters": None,
}
# transformers' defaults
LANGUAGE_DEFAULTS: Mapping[str, Any] = {
    "rope_theta": 1_000_000.0,
    "rms_norm_eps": 1e-5,
    "max_window_layers": 80,
}
# transformers 5 writes the image processor into the second one.
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
PROCESSORS = (None, "Qwen2VLImageProcessor", "Qwen2VLImageProcessorFast", "Qwen2VLImageProcessorPil")
USUAL: Mapping[str, Any] = {"do_resize": True, "do_rescale": True, "do_normalize": True, "resample": BICUBIC}
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)  # the processor's default
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)


@dataclass(frozen=True, slots=True)
class QwenVision:
    """A `VisionConfig` of a tower that reads images of any size in patches: `merge_size` squared ones are one token."""

    family: ClassVar[str] = "qwen"
    names: ClassVar[TowerNames] = TowerNames("Qwen", "visual.", "model.", "", ("visual.",))

    architecture: str
    # Keys of TOWER_DEFAULTS from vision_config, as JSON; for Qwen3.5 those of `qwen_3_5_config.TOWER`, and "learned"
    tower_options: str
    image_token_id: int  # placeholder of an image in a tokenized prompt
    video_token_id: int
    patch_size: int  # pixels, both sides
    temporal_patch_size: int  # frames, which are all the same image
    merge_size: int  # patches, both sides
    min_pixels: int
    max_pixels: int
    rescale_factor: float
    image_mean: tuple[float, ...]
    image_std: tuple[float, ...]

    @property
    def refused_token_ids(self) -> tuple[int, ...]:
        """Placeholders of inputs that are not served."""
        return (self.video_token_id,)

    def size(self, width: int, height: int) -> tuple[int, int]:
        """Return the (width, height) to which an image is resized. Raises InvalidRequest if it is too narrow."""
        if max(width, height) > MAX_RATIO * min(width, height):
            raise InvalidRequest(
                f"the image has {width} x {height} pixels: its longer side is more than {MAX_RATIO} times the shorter"
            )
        unit = self.patch_size * self.merge_size
        across, down = round(width / unit) * unit, round(height / unit) * unit
        if across * down > self.max_pixels:
            shrink = math.sqrt((height * width) / self.max_pixels)
            across = max(unit, math.floor(width / shrink / unit) * unit)
            down = max(unit, math.floor(height / shrink / unit) * unit)
        elif across * down < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (height * width))
            across, down = math.ceil(width * grow / unit) * unit, math.ceil(height * grow / unit) * unit
        return across, down

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """Return (rows, columns) of the tokens of an image of this many pixels. Raises InvalidRequest."""
        across, down = self.size(width, height)
        unit = self.patch_size * self.merge_size
        return down // unit, across // unit

    def tower_size(self, hidden: int) -> TowerSize:
        options = {**TOWER_DEFAULTS, **json.loads(self.tower_options)}
        width, inner, layers = (options[key] for key in ("hidden_size", "intermediate_size", "depth"))
        matrices = 2 if options.get("learned") else 3
        values = layers * (4 * width + matrices * inner) * width + self.merge_size**2 * width * hidden
        values += width * options.get("num_position_embeddings", 0)
        return TowerSize(values, width, inner, layers)


def qwen_language(raw: Mapping[str, Any], where: str) -> tuple[dict[str, Any], tuple[int, ...]]:
    """Return the config.json of the language model, a Qwen2, and its rotary sections.

    Its fields are in text_config; in older files they are next to vision_config.
    """
    nested = raw.get("text_config") is not None
    text = section(raw, "text_config", where) if nested else raw
    outer = {
        key: raw[key] for key in ("dtype", "torch_dtype", "eos_token_id", "quantization_config") if key in raw
    }
    tied = any(flag(part, "tie_word_embeddings", where) for part in (raw, text))
    inner = {key: value for key, value in text.items() if value is not None}
    language, sections = split_sections({**LANGUAGE_DEFAULTS, **outer, **inner}, where)
    if not sections:
        raise ModelError(f"{where}: the rope parameters of this model need {SECTIONS}")
    return {**language, "architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": tied}, sections


@dataclass(frozen=True, slots=True)
class TowerFields:
    """The fields in which families of towers differ."""

    patch_size: int  # default
    options: Callable[[Mapping[str, Any], str], dict[str, Any]]  # reads the keys that define the tower


def parse_qwen(raw: Mapping[str, Any], directory: Path) -> QwenVision:
    """Return the vision config of Qwen2.5-VL. Raises ModelError with what is not supported."""
    return read_vision(raw, directory, TowerFields(patch_size=14, options=_tower))


def read_vision(raw: Mapping[str, Any], directory: Path, fields: TowerFields) -> QwenVision:
    """Return the vision config. Raises ModelError with what is not supported."""
    where = str(directory / "config.json")
    options = section(raw, "vision_config", where)
    named = f"{where}: vision_config"
    key = "in_channels" if options.get("in_channels") is not None else "in_chans"
    channels = positive(options, key, named, 3)
    if channels != 3:
        raise ModelError(f"{named}: {channels} channels are not supported, images have 3")
    text = raw if raw.get("text_config") is None else section(raw, "text_config", where)
    given, taken = positive(options, "out_hidden_size", named, 3584), text.get("hidden_size")
    if given != taken:
        raise ModelError(
            f"{named}: out_hidden_size {given} is not the language model's hidden_size {shown(taken)}"
        )
    file, values = _processor(directory)
    patch = positive(values, "patch_size", file, 14, MAX_PATCH_SIZE)
    merge = positive(values, "merge_size", file, 2, MAX_MERGE_SIZE)
    frames = positive(values, "temporal_patch_size", file, 2, MAX_FRAMES)
    for key, value, default in (
        ("patch_size", patch, fields.patch_size),
        ("spatial_merge_size", merge, 2),
        ("temporal_patch_size", frames, 2),
    ):
        if positive(options, key, named, default) != value:
            raise ModelError(
                f"{file}: {key} {value} differs from that of the tower, {options.get(key, default)}"
            )
    least, most = _limits(values, file)
    unit = (patch * merge) ** 2
    if least > most or not unit <= most <= min(MAX_IMAGE_TOKENS * unit, MAX_PIXELS):
        raise ModelError(
            f"{file}: images of {least} to {most} pixels (min_pixels, max_pixels) are not supported; at most "
            f"{MAX_IMAGE_TOKENS} tokens of {patch * merge} x {patch * merge} pixels, and {MAX_PIXELS} pixels"
        )
    return QwenVision(
        architecture=str(architecture_of(raw)),
        tower_options=json.dumps(fields.options(options, named), sort_keys=True),
        image_token_id=token_id(raw, ("image_token_id",), where),
        video_token_id=token_id(raw, ("video_token_id",), where),
        patch_size=patch,
        temporal_patch_size=frames,
        merge_size=merge,
        min_pixels=least,
        max_pixels=most,
        rescale_factor=_numbers(values, "rescale_factor", (1 / 255,), file)[0],
        image_mean=_numbers(values, "image_mean", CLIP_MEAN, file),
        image_std=_numbers(values, "image_std", CLIP_STD, file),
    )


def _tower(options: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the keys of TOWER_DEFAULTS in vision_config, checked."""
    found = {key: options[key] for key in TOWER_DEFAULTS if options.get(key) is not None}
    for key, most in (
        ("depth", MAX_LAYERS),
        ("hidden_size", MAX_WIDTH),
        ("intermediate_size", MAX_WIDTH),
        ("num_heads", MAX_HEADS),
        ("window_size", MAX_WIDTH),
    ):
        positive(found, key, where, TOWER_DEFAULTS[key], most)
    word(found, "hidden_act", where, "silu")
    layers = found.get("fullatt_block_indexes", [])
    if not isinstance(layers, list) or not all(
        type(each) is int and 0 <= each < MAX_LAYERS for each in layers
    ):
        raise ModelError(f"{where}: fullatt_block_indexes must be a list of layers, found {shown(layers)}")
    rope = optional_section(found, "rope_parameters", where)
    theta = number(rope, "rope_theta", f"{where}: rope_parameters", 10_000.0)
    return {**found, "rope_parameters": {"rope_theta": theta}} if rope else found


def _processor(directory: Path) -> tuple[str, Mapping[str, Any]]:
    """Return (file, the image processor's values)."""
    file, outer = (directory / name for name in PROCESSOR_FILES)
    if file.is_file() or not outer.is_file():
        values = model_files.read_json(file)
    else:
        file, values = outer, section(model_files.read_json(outer), "image_processor", str(outer))
    if values.get("image_processor_type") not in PROCESSORS:
        raise ModelError(
            f"{file}: image_processor_type {shown(values['image_processor_type'])} is not supported"
        )
    for key, usual in USUAL.items():
        if values.get(key, usual) != usual:
            raise ModelError(f"{file}: {key} {shown(values[key])} is not supported, only {usual!r}")
    return str(file), values


def _limits(values: Mapping[str, Any], where: str) -> tuple[int, int]:
    """Return the minimum and maximum pixels of a resized image."""
    size = optional_section(values, "size", where)
    edges = {
        "min_pixels": size.get("shortest_edge", size.get("min_pixels")),
        "max_pixels": size.get("longest_edge", size.get("max_pixels")),
    }
    found = {**edges, **{key: values[key] for key in edges if values.get(key) is not None}}
    most = 1 << 62  # the caller checks the bound
    return (
        positive(found, "min_pixels", where, 56 * 56, most),
        positive(found, "max_pixels", where, 28 * 28 * 1280, most),
    )


def _numbers(
    values: Mapping[str, Any], key: str, default: tuple[float, ...], where: str
) -> tuple[float, ...]:
    """Return as many positive numbers as `default` has."""
    found = values.get(key)
    given = list(default) if found is None else found if isinstance(found, list) else [found]
    if len(given) != len(default) or not all(type(each) in (int, float) and 0 < each < 1e3 for each in given):
        raise ModelError(f"{where}: {key} must be {len(default)} positive numbers, found {shown(found)}")
    return tuple(float(each) for each in given)
