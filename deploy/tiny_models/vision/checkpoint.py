"""The vision model as a standard Hugging Face directory: LLaVA layout, CLIP tower, Llama, LlavaProcessor files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
)

from deploy.tiny_models import tokenizer as family
from deploy.tiny_models.checkpoint import Shape, config_dict, generation_config, write_weights
from deploy.tiny_models.vision.scenes import SIDE

PATCH = 8
IMAGE_TOKENS = (SIDE // PATCH) ** 2
MEAN = (0.48145466, 0.4578275, 0.40821073)  # CLIP's values
STD = (0.26862954, 0.26130258, 0.27577711)
MAX_POSITIONS = 2048
SHAPE = Shape(
    hidden_size=128,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    intermediate_size=384,
)
SMOKE_SHAPE = Shape(
    hidden_size=64,
    num_hidden_layers=4,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=32,
    intermediate_size=96,
)
TOWER = {
    "model_type": "clip_vision_model",
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_channels": 3,
    "image_size": SIDE,
    "patch_size": PATCH,
    "hidden_act": "quick_gelu",
    "layer_norm_eps": 1e-5,
}

# Like the family's template, with parts: a picture becomes just <image>, and a text part gets one leading space.
CHAT_TEMPLATE = """\
{{- '<|bos|>' }}
{%- for message in messages %}
    {%- if message['role'] not in ['system', 'user', 'assistant'] %}
        {{- raise_exception('unknown role ' + message['role'] + ': use system, user or assistant') }}
    {%- endif %}
    {{- '<|' + message['role'] + '|>' }}
    {%- if message['content'] is string %}
        {{- ' ' + message['content'] | trim }}
    {%- else %}
        {%- for part in message['content'] %}
            {%- if part['type'] == 'image' %}
                {{- '<image>' }}
            {%- elif part['type'] == 'text' %}
                {{- ' ' + part['text'] | trim }}
            {%- else %}
                {{- raise_exception('content of type ' + part['type'] + ': use text or image') }}
            {%- endif %}
        {%- endfor %}
    {%- endif %}
    {{- '<|end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>' }}
{%- endif %}
"""


def llava_config(shape: Shape, tokenizer: Tokenizer) -> dict[str, Any]:
    """Build config.json."""
    text = config_dict(shape, tokenizer)
    text["max_position_embeddings"] = MAX_POSITIONS
    return {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "text_config": text,
        "vision_config": TOWER,
        "image_token_index": tokenizer.token_to_id(family.IMAGE),
        "image_seq_length": IMAGE_TOKENS,
        "projector_hidden_act": "gelu",
        "multimodal_projector_bias": True,
        "vision_feature_layer": -2,
        "vision_feature_select_strategy": "default",
        "tie_word_embeddings": False,
        **{key: text[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")},
        "torch_dtype": "bfloat16",
    }


def new_model(config: dict[str, Any], seed: int) -> LlavaForConditionalGeneration:
    """Create a newly initialized fp32 model."""
    torch.manual_seed(seed)
    text = {
        key: value for key, value in config["text_config"].items() if key not in ("torch_dtype", "rope_theta")
    }
    rest = ("text_config", "vision_config", "torch_dtype", "architectures")
    return LlavaForConditionalGeneration(
        LlavaConfig(
            text_config=LlamaConfig(**text),
            vision_config=CLIPVisionConfig(**config["vision_config"]),
            **{key: value for key, value in config.items() if key not in rest},
        )
    )


def language_model(model: LlavaForConditionalGeneration) -> LlamaForCausalLM:
    """Return the language model, sharing its weights with the whole: a draft is trained against it."""
    inner: Any = model
    with torch.device("meta"):
        language = LlamaForCausalLM(inner.config.text_config)
    language.model, language.lm_head = inner.model.language_model, inner.lm_head
    return language


def checkpoint_name(name: str) -> str:
    """Map a parameter's name to the layout of published LLaVA checkpoints, which every transformers version reads."""
    for inner, outer in (
        ("model.language_model.", "language_model.model."),
        ("lm_head.", "language_model.lm_head."),
        ("model.vision_tower.vision_model.", "vision_tower.vision_model."),
        ("model.vision_tower.", "vision_tower.vision_model."),
        ("model.multi_modal_projector.", "multi_modal_projector."),
    ):
        if name.startswith(inner):
            return outer + name.removeprefix(inner)
    raise ValueError(f"{name} has no place in a LLaVA checkpoint")


def save(
    directory: Path, model: LlavaForConditionalGeneration, config: dict[str, Any], tokenizer: Tokenizer
) -> None:
    """Write everything except the model card."""
    directory.mkdir(parents=True, exist_ok=True)
    weights = {
        checkpoint_name(name): value.detach().cpu().bfloat16().contiguous()
        for name, value in model.named_parameters()
    }
    write_weights(directory / "model.safetensors", weights)
    family.write(tokenizer, directory)
    write_companions(directory, config)


def write_companions(directory: Path, config: dict[str, Any]) -> None:
    """Write the small files that do not depend on training."""
    tokens = json.loads((directory / "tokenizer_config.json").read_text())
    tokens |= {"model_max_length": MAX_POSITIONS, "processor_class": "LlavaProcessor"}
    files: dict[str, dict[str, Any]] = {
        "config.json": config,
        "generation_config.json": generation_config(config),
        "tokenizer_config.json": tokens,
        "preprocessor_config.json": {
            "image_processor_type": "CLIPImageProcessor",
            "processor_class": "LlavaProcessor",
            "do_convert_rgb": True,
            "do_resize": True,
            "size": {"shortest_edge": SIDE},
            "resample": 3,
            "do_center_crop": True,
            "crop_size": {"height": SIDE, "width": SIDE},
            "do_rescale": True,
            "rescale_factor": 1 / 255,
            "do_normalize": True,
            "image_mean": list(MEAN),
            "image_std": list(STD),
        },
        "processor_config.json": {
            "processor_class": "LlavaProcessor",
            "patch_size": PATCH,
            "num_additional_image_tokens": 1,
            "vision_feature_select_strategy": "default",
            "image_token": family.IMAGE,
        },
    }
    for name, value in files.items():
        (directory / name).write_text(json.dumps(value, indent=2) + "\n")
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE)
