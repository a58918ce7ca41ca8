"""Models for benchmarks by the name of a published checkpoint or from a config.json, with constructed weights."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from common.checkpoint.draft_config import DraftConfig, quantized_draft, with_steps
from common.checkpoint.model_config import ModelConfig
from common.engine.forward.model_runner import load_model
from common.engine.layers.placement import Placement
from common.engine.layers.ranks import ONE_RANK, Ranks
from common.engine.models.causal_lm import CausalLM
from common.engine.models.eagle import D2T, Eagle3Head
from common.engine.models.model_registry import build_model
from common.engine.models.mtp import build_mtp
from common.kv_cache.kv_values import AS_COMPUTED, FP8, KvValues
from common.node.loaded_draft import HeadDraft, LoadedDraft, ModulesDraft
from common.node.serving_draft import ServingDraft, draft_shape, load_serving_draft
from common.speculation.directory import algorithm_of, load_draft_config
from deploy.tiny_models.constructed_head import Drafting, head_config, head_tensors
from deploy.tiny_models.constructed_module import ModuleTensors
from deploy.tiny_models.constructed_shape import SPECIAL, Shape
from deploy.tiny_models.constructed_tensors import TargetTensors, shape_of, stacks_experts
from tests.bench.constructed_model import fill
from tests.unit.checkpoint.published import PUBLISHED

LLAMA, LLAMA_70B = "llama-3.1-8b", "llama-3.1-70b"
SHAPES = {name.rpartition("/")[2].lower(): name for name in ("Qwen/Qwen3-30B-A3B", "Qwen/Qwen3.5-35B-A3B")}
LLAMAS = {LLAMA: Shape(), LLAMA_70B: Shape(hidden=8192, layers=80, heads=64, inter=28672)}
TEXT_ONLY = {"ForConditionalGeneration": "ForCausalLM"}
DRAFT_VOCAB = 32000
FIRST_ORDINARY = 8  # id of the tiny models' tokenizers that is not special
KV_DTYPES = {"auto": AS_COMPUTED, "fp8": KvValues(FP8)}  # as `kv.dtype`
EAGLE3, MTP = "eagle3", "mtp"


@dataclass(frozen=True, slots=True)
class Pair:
    """A target and the draft that is served with it, on one device."""

    model: CausalLM
    serving: ServingDraft
    first_id: int  # the smallest id that occurs in prompts

    @property
    def draft(self) -> DraftConfig:
        return self.serving.config

    @property
    def placement(self) -> Placement:
        return self.model.placement


def config_of(shape: str) -> dict[str, Any]:
    """Return the config.json of the text-only form of a shape: a Llama's, a key of SHAPES, or a directory."""
    if shape in LLAMAS:
        return LLAMAS[shape].config()
    if shape in SHAPES:
        (found,) = (each for each in PUBLISHED if each.name == SHAPES[shape])
        raw = {"architectures": [found.architecture], **found.config}
    elif (Path(shape) / "config.json").is_file():
        raw = json.loads((Path(shape) / "config.json").read_text())
    else:
        raise SystemExit(
            f"{shape} is neither a directory with config.json nor one of {', '.join((*LLAMAS, *SHAPES))}"
        )
    if "text_config" not in raw:
        return raw
    (name,) = raw["architectures"]
    for full, text in TEXT_ONLY.items():
        name = name.replace(full, text)
    outer = {key: value for key, value in raw.items() if not isinstance(value, dict)}
    return {**outer, **raw["text_config"], "architectures": [name]}


def config_at(raw: Mapping[str, Any]) -> ModelConfig:
    """Return what the engine reads of a config.json. Raises ModelError."""
    with _directory(raw) as path:
        return ModelConfig.load(path)


def loaded(path: Path, draft: Path, steps: int, device: torch.device) -> Pair:
    """Load a target and its draft from Hugging Face directories."""
    config = ModelConfig.load(path)
    described = with_steps(load_draft_config(draft, algorithm_of(draft, path), config), steps)
    model, _ = load_model(path, "auto", device, aux_layers=described.aux_layers)
    serving = load_serving_draft(draft, described, steps, 1, model)
    return Pair(model, serving, FIRST_ORDINARY)


def target(
    raw: Mapping[str, Any],
    seed: int,
    device: torch.device,
    quantization: str = "none",
    ranks: Ranks = ONE_RANK,
) -> CausalLM:
    """Construct the share of a target that these ranks say, with weights as `model.quantization` says."""
    config = config_at(raw).quantized(quantization)
    return _target(config, _tensors(config, seed, device), (), ranks)


def pair(
    raw: Mapping[str, Any],
    algorithm: str,
    drafting: Drafting,
    steps: int,
    seed: int,
    device: torch.device,
    quantization: str = "none",
    draft_quantization: str = "none",
    ranks: Ranks = ONE_RANK,
) -> Pair:
    """Construct a target and an EAGLE-3 head or an MTP module that drafts for it with the chosen acceptance.

    Args:
        quantization, draft_quantization: as `model.quantization` and `speculation.draft_quantization`.
        ranks: says which share of both is constructed.

    Raises ModelError if a checkpoint of this config has no module, and ValueError for a config whose text cannot be
    chosen.
    """
    with _directory(raw) as path:
        config = ModelConfig.load(path).quantized(quantization)
        if algorithm == MTP:
            draft = with_steps(load_draft_config(path, MTP, config), steps)
            tensors = _tensors(config, seed, device, drafting)
            model = _target(config, tensors, (), ranks)
            return _with_module(draft, model, tensors)
        tensors = _tensors(config, seed, device)
        shape = tensors.shape
        with _directory(head_config(shape)) as head_path:
            draft = quantized_draft(load_draft_config(head_path, EAGLE3, config), draft_quantization)
    model = _target(config, tensors, draft.aux_layers, ranks)
    head = Eagle3Head(draft, model, model.placement, (D2T,)).eval()
    found = dict(head_tensors(shape, drafting, seed, device))
    fill(head.pieces(), lambda piece: found[piece.name], stacked=False)
    return _with_loaded(model, HeadDraft(head, 1), draft)


def _with_module(draft: DraftConfig, model: CausalLM, tensors: TargetTensors) -> Pair:
    modules = build_mtp(draft, model, model.placement).eval()
    make = ModuleTensors(draft, tensors)
    fill(modules.pieces(), make, stacks_experts(model.config))
    return _with_loaded(model, ModulesDraft(modules, draft.repeats), draft)


def _with_loaded(model: CausalLM, loaded: LoadedDraft, draft: DraftConfig) -> Pair:
    shape = draft_shape(draft, 1, model.placement)
    return Pair(model, ServingDraft(loaded, draft, "bench", shape), SPECIAL)


def _tensors(
    config: ModelConfig, seed: int, device: torch.device, marks: Drafting | None = None
) -> TargetTensors:
    vocab = min(DRAFT_VOCAB, config.vocab_size // 2)
    return TargetTensors(config, shape_of(config, vocab), seed, device, marks)


def _target(
    config: ModelConfig, tensors: TargetTensors, aux_layers: tuple[int, ...], ranks: Ranks
) -> CausalLM:
    device = tensors.device
    placement = Placement(torch.bfloat16 if device.type == "cuda" else torch.float32, device, ranks)
    model = build_model(config, placement, aux_layers).eval()
    fill(model.pieces(), tensors, stacks_experts(config))
    return model


@contextmanager
def _directory(raw: Mapping[str, object]) -> Iterator[Path]:
    """Make a model directory that has a config, and one tensor, by which heads are recognised."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(dict(raw)))
        save_file({"fc.weight": torch.zeros(1)}, Path(folder) / "model.safetensors")
        yield Path(folder)
