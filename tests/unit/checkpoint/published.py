"""Published checkpoints: config values, where they were read, and whether they load. Prints docs/checkpoints.md.

python -m tests.unit.checkpoint.published > docs/checkpoints.md
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from common.checkpoint.families import FAMILIES
from tests.fakes.fp8_sections import BLOCKS, CHANNEL_DYNAMIC, COMPRESSED_STATIC, INT4, MODELOPT

SLIME = "launch scripts of slime (GitHub)"
UNSEEN = "not seen: sizes as commonly stated"
UNSEEN_NAME = "not seen: the architecture as commonly stated"
BY_NAME = "architecture {} is not supported"


def defaults(sibling: str = "") -> str:
    """Return the source of values that are the defaults of transformers' config class."""
    return f"transformers' defaults{f', which name {sibling}' if sibling else ''}"


@dataclass(frozen=True)
class Published:
    """One checkpoint. `config` leaves out token ids and what no reader of the config uses."""

    name: str
    architecture: str
    source: str
    config: dict[str, Any]
    refused: str = ""  # how the refusal begins, after the path of config.json; "": it loads
    modules: bool = False  # the file also has modules of multi-token prediction
    processor: dict[str, Any] | None = None  # preprocessor_config.json of a model that takes images


def sizes(
    hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocab: int, positions: int, **more: Any
) -> dict[str, Any]:
    """Return the keys that every decoder has."""
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "max_position_embeddings": positions,
        "torch_dtype": "bfloat16",
        **more,
    }


def llama3(factor: float) -> dict[str, Any]:
    """Return the rope and norm of Llama 3.1 and 3.2."""
    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    return {"rope_scaling": scaling, "rope_theta": 500_000.0, "rms_norm_eps": 1e-5}


LLAMA, QWEN2, QWEN3 = "LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"
PHI3, GEMMA3 = "Phi3ForCausalLM", "Gemma3ForCausalLM"
QWEN = {"rope_theta": 1_000_000.0, "rms_norm_eps": 1e-6, "use_sliding_window": False}
LONG = {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48}
HYBRID = {
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "rope_theta": 10_000_000.0,
    "partial_rotary_factor": 0.25,
}
MROPE = {
    "rope_type": "default",
    "rope_theta": 10_000_000.0,
    "partial_rotary_factor": 0.25,
    "mrope_interleaved": True,
    "mrope_section": [11, 11, 10],
}
QWEN_3_5_IMAGES = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "size": {"shortest_edge": 65_536, "longest_edge": 16_777_216},
}


def by_name(name: str, architecture: str, source: str, **config: Any) -> Published:
    """Return a checkpoint whose architecture has no row in the table of families."""
    return Published(name, architecture, source, config, BY_NAME.format(architecture))


PUBLISHED = (
    Published(
        "meta-llama/Llama-2-7b-hf",
        LLAMA,
        defaults("it"),
        sizes(4096, 11008, 32, 32, 32, 32000, 4096, rms_norm_eps=1e-5),
    ),
    Published(
        "meta-llama/Llama-3.1-8B",
        LLAMA,
        "its config.json, quoted in public source",
        sizes(4096, 14336, 32, 32, 8, 128_256, 131_072, head_dim=128, **llama3(8.0)),
    ),
    Published(
        "meta-llama/Llama-3.2-3B",
        LLAMA,
        f"{SLIME}; the tied head as commonly stated",
        sizes(3072, 8192, 28, 24, 8, 128_256, 131_072, tie_word_embeddings=True, **llama3(32.0)),
    ),
    Published(
        "TinyLlama/TinyLlama-1.1B-Chat-v1.0", LLAMA, UNSEEN, sizes(2048, 5632, 22, 32, 4, 32000, 2048)
    ),
    Published(
        "HuggingFaceTB/SmolLM2-135M",
        LLAMA,
        "sizes in public source; the rest not seen",
        sizes(576, 1536, 30, 9, 3, 49152, 8192, tie_word_embeddings=True),
    ),
    Published("01-ai/Yi-6B", LLAMA, UNSEEN, sizes(4096, 11008, 32, 32, 4, 64000, 4096, rope_theta=5e6)),
    Published(
        "deepseek-ai/DeepSeek-R1-Distill-Llama-8B",
        LLAMA,
        "as Llama 3.1 8B, on which it is based",
        sizes(4096, 14336, 32, 32, 8, 128_256, 131_072, **llama3(8.0)),
    ),
    Published(
        "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B",
        QWEN2,
        UNSEEN,
        sizes(3584, 18944, 28, 28, 4, 152_064, 131_072, rope_theta=10_000.0, sliding_window=4096),
    ),
    Published(
        "mistralai/Mistral-7B-v0.1",
        "MistralForCausalLM",
        defaults("it"),
        sizes(4096, 14336, 32, 32, 8, 32000, 32768, sliding_window=4096),
    ),
    Published(
        "mistralai/Mistral-7B-Instruct-v0.3",
        "MistralForCausalLM",
        UNSEEN,
        sizes(4096, 14336, 32, 32, 8, 32768, 32768, sliding_window=None, rope_theta=1e6),
    ),
    Published(
        "mistralai/Ministral-8B-Instruct-2410",
        "MistralForCausalLM",
        "sizes in public source, the order of windows by transformers' page on it; the keys not seen",
        sizes(
            4096, 12288, 36, 32, 8, 131_072, 32768, head_dim=128, sliding_window=32768,
            layer_types=["full_attention", *["sliding_attention"] * 3] * 9,
        ),
    ),
    Published(
        "mistralai/Mixtral-8x7B-v0.1",
        "MixtralForCausalLM",
        defaults("it"),
        sizes(4096, 14336, 32, 32, 8, 32000, 32768, num_local_experts=8, num_experts_per_tok=2),
    ),
    by_name(
        "mistralai/Mistral-Small-3.1-24B-Instruct-2503", "Mistral3ForConditionalGeneration", defaults("it")
    ),
    Published(
        "Qwen/Qwen2-7B-Instruct",
        QWEN2,
        "its config.json, quoted in public source",
        sizes(3584, 18944, 28, 28, 4, 152_064, 32768, sliding_window=None, max_window_layers=28, **QWEN),
    ),
    Published(
        "Qwen/Qwen2.5-7B-Instruct", QWEN2, SLIME, sizes(3584, 18944, 28, 28, 4, 152_064, 32768, **QWEN)
    ),
    Published(
        "Qwen/Qwen2.5-0.5B",
        QWEN2,
        "its config.json, quoted in public source",
        sizes(896, 4864, 24, 14, 2, 151_936, 32768, tie_word_embeddings=True, use_mrope=False, **QWEN),
    ),
    Published(
        "Qwen/Qwen2.5-7B-Instruct-AWQ",
        QWEN2,
        UNSEEN,
        sizes(
            3584, 18944, 28, 28, 4, 152_064, 32768, quantization_config={"quant_method": "awq", "bits": 4}
        ),
        "quantization_config: quantization awq is not supported",
    ),
    Published(
        "Qwen/Qwen3-8B", QWEN3, SLIME, sizes(4096, 12288, 36, 32, 8, 151_936, 40960, head_dim=128, **QWEN)
    ),
    Published(
        "Qwen/Qwen3-8B-FP8",
        QWEN3,
        "as Qwen3-8B; its quantization as transformers writes it",
        sizes(
            4096, 12288, 36, 32, 8, 151_936, 40960, head_dim=128, quantization_config=BLOCKS, **QWEN
        ),
    ),
    Published(
        "Qwen/Qwen3-30B-A3B",
        "Qwen3MoeForCausalLM",
        SLIME,
        sizes(
            2048, 6144, 48, 32, 4, 151_936, 40960, head_dim=128, num_experts=128, num_experts_per_tok=8,
            moe_intermediate_size=768, norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[], **QWEN,
        ),
    ),
    Published(
        "Qwen/Qwen3-30B-A3B-FP8",
        "Qwen3MoeForCausalLM",
        "as Qwen3-30B-A3B; its quantization as transformers writes it",
        sizes(
            2048, 6144, 48, 32, 4, 151_936, 40960, head_dim=128, num_experts=128, num_experts_per_tok=8,
            moe_intermediate_size=768, norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[],
            quantization_config=BLOCKS, **QWEN,
        ),
    ),
    Published(
        "RedHatAI/Qwen3-8B-FP8-dynamic",
        QWEN3,
        "as Qwen3-8B; its quantization as compressed-tensors writes it",
        sizes(4096, 12288, 36, 32, 8, 151_936, 40960, head_dim=128, quantization_config=CHANNEL_DYNAMIC, **QWEN),
    ),
    Published(
        "RedHatAI/Qwen3-8B-quantized.w4a16",
        QWEN3,
        "as Qwen3-8B; its quantization as compressed-tensors writes it",
        sizes(4096, 12288, 36, 32, 8, 151_936, 40960, head_dim=128, quantization_config=INT4, **QWEN),
        "quantization_config: config_groups: group_0: weights of type 'int' with num_bits 4 are not supported",
    ),
    Published(
        "neuralmagic/Meta-Llama-3.1-8B-Instruct-FP8",
        LLAMA,
        "as Llama-3.1-8B; its quantization as compressed-tensors writes it",
        sizes(4096, 14336, 32, 32, 8, 128_256, 131_072, quantization_config=COMPRESSED_STATIC, **llama3(8.0)),
    ),
    Published(
        "nvidia/Llama-3.1-8B-Instruct-FP8",
        LLAMA,
        "as Llama-3.1-8B; its quantization as ModelOpt writes it",
        sizes(4096, 14336, 32, 32, 8, 128_256, 131_072, quantization_config=MODELOPT, **llama3(8.0)),
    ),
    Published(
        "nvidia/Llama-3.1-8B-Instruct-NVFP4",
        LLAMA,
        "as Llama-3.1-8B; its quantization as ModelOpt writes it",
        sizes(
            4096, 14336, 32, 32, 8, 128_256, 131_072, **llama3(8.0),
            quantization_config={"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]},
        ),
        "quantization_config: quant_algo 'NVFP4' is not supported; supported is FP8",
    ),
    Published(
        "zai-org/GLM-4.5",
        "Glm4MoeForCausalLM",
        SLIME,
        sizes(
            5120, 12288, 92, 96, 8, 151_552, 131_072, head_dim=128, rope_theta=1e6, rms_norm_eps=1e-5,
            partial_rotary_factor=0.5, attention_bias=True, use_qk_norm=True, n_routed_experts=160,
            n_shared_experts=1, num_experts_per_tok=8, moe_intermediate_size=1536, n_group=1, topk_group=1,
            routed_scaling_factor=2.5, first_k_dense_replace=3, norm_topk_prob=True, num_nextn_predict_layers=1,
        ),
        modules=True,
    ),
    Published(
        "zai-org/GLM-4.5-Air",
        "Glm4MoeForCausalLM",
        f"{defaults('GLM-4.5')}, whose sizes are those of Air",
        sizes(
            4096, 10944, 46, 96, 8, 151_552, 131_072, head_dim=128, rope_theta=1e6, rms_norm_eps=1e-5,
            partial_rotary_factor=0.5, attention_bias=True, use_qk_norm=False, n_routed_experts=128,
            n_shared_experts=1, num_experts_per_tok=8, moe_intermediate_size=1408, n_group=1, topk_group=1,
            routed_scaling_factor=1.0, first_k_dense_replace=1, norm_topk_prob=True, num_nextn_predict_layers=1,
        ),
        modules=True,
    ),
    Published(
        "Qwen/Qwen3-Next-80B-A3B-Instruct",
        "Qwen3NextForCausalLM",
        f"{SLIME}, {defaults('it')}",
        sizes(
            2048, 5120, 48, 16, 2, 151_936, 262_144, num_experts=512, num_experts_per_tok=10,
            moe_intermediate_size=512, shared_expert_intermediate_size=512, norm_topk_prob=True, **HYBRID,
        ),
        modules=True,
    ),
    Published(
        "Qwen/Qwen3.5-35B-A3B",
        "Qwen3_5MoeForConditionalGeneration",
        f"a copy of the 3.6 file, {defaults('it')}",
        {
            "torch_dtype": "bfloat16",
            "image_token_id": 248_056,
            "video_token_id": 248_057,
            "vision_config": {"depth": 27, "hidden_size": 1152, "patch_size": 16, "out_hidden_size": 2048},
            "text_config": {
                **sizes(2048, 512, 40, 16, 2, 248_320, 262_144, num_experts=256, num_experts_per_tok=8),
                **HYBRID,
                "moe_intermediate_size": 512,
                "shared_expert_intermediate_size": 512,
                "rope_parameters": MROPE,
            },
        },
        modules=True,
        processor=QWEN_3_5_IMAGES,
    ),
    Published(
        "Qwen/Qwen3.5-27B",
        "Qwen3_5ForConditionalGeneration",
        f"{defaults('it')}, with sizes of a smaller one",
        {
            "torch_dtype": "bfloat16",
            "image_token_id": 248_056,
            "video_token_id": 248_057,
            "vision_config": {"depth": 27, "hidden_size": 1152, "patch_size": 16, "out_hidden_size": 4096},
            "text_config": {
                **sizes(4096, 12288, 32, 16, 4, 248_320, 262_144),
                **HYBRID,
                "rope_parameters": MROPE,
            },
        },
        modules=True,
        processor=QWEN_3_5_IMAGES,
    ),
    by_name("deepseek-ai/DeepSeek-V3", "DeepseekV3ForCausalLM", defaults(), hidden_size=7168),
    by_name("deepseek-ai/DeepSeek-V2-Lite", "DeepseekV2ForCausalLM", defaults("it"), hidden_size=2048),
    by_name("openai/gpt-oss-20b", "GptOssForCausalLM", defaults("it"), hidden_size=2880),
    by_name("google/gemma-2-9b", "Gemma2ForCausalLM", defaults("gemma2-7b"), hidden_size=3584),
    Published(
        "google/gemma-3-1b-it",
        GEMMA3,
        UNSEEN,
        sizes(
            1152, 6912, 26, 4, 1, 262_144, 32768, head_dim=256, sliding_window=512, sliding_window_pattern=6,
            query_pre_attn_scalar=256, rope_theta=1e6, rope_local_base_freq=1e4,
        ),
    ),
    Published(
        "google/gemma-3-4b-it",
        "Gemma3ForConditionalGeneration",
        f"{defaults('it')}; the keys of text_config not seen",
        {
            "torch_dtype": "bfloat16",
            "vision_config": {"hidden_size": 1152},
            "text_config": {
                "hidden_size": 2560,
                "intermediate_size": 10240,
                "num_hidden_layers": 34,
                "sliding_window": 1024,
                "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            },
        },
    ),
    Published(
        "microsoft/Phi-3-mini-4k-instruct", PHI3, defaults("it"), sizes(3072, 8192, 32, 32, 32, 32064, 4096)
    ),
    Published(
        "microsoft/Phi-3-mini-128k-instruct",
        PHI3,
        f"{defaults('its 4k form')}; the factors not seen",
        sizes(
            3072, 8192, 32, 32, 32, 32064, 131_072, rope_scaling=LONG, original_max_position_embeddings=4096,
            sliding_window=262_144,
        ),
    ),
    Published("microsoft/phi-4", PHI3, UNSEEN, sizes(5120, 17920, 40, 40, 10, 100_352, 16384, rope_theta=2.5e5)),
    Published(
        "microsoft/Phi-4-mini-instruct",
        PHI3,
        "sizes in public source; the partial rope not seen",
        sizes(
            3072, 8192, 32, 24, 8, 200_064, 131_072, rope_scaling=LONG, original_max_position_embeddings=4096,
            partial_rotary_factor=0.75, tie_word_embeddings=True,
        ),
    ),
    by_name("microsoft/phi-2", "PhiForCausalLM", "its modules, printed in public source", hidden_size=2560),
    Published(
        "allenai/OLMo-2-1124-7B",
        "Olmo2ForCausalLM",
        f"{defaults('it')}; vocabulary and rope not seen",
        sizes(4096, 11008, 32, 32, 32, 100_352, 4096, rope_theta=5e5, rms_norm_eps=1e-6),
    ),
    Published(
        "XiaomiMiMo/MiMo-7B-RL",
        "MiMoForCausalLM",
        SLIME,
        sizes(
            4096, 11008, 36, 32, 8, 151_680, 32768, rope_theta=640_000, rms_norm_eps=1e-5, head_dim=128,
            num_nextn_predict_layers=1,
        ),
        modules=True,
    ),
    by_name("XiaomiMiMo/MiMo-V2-Flash", "MiMoV2FlashForCausalLM", defaults("it"), hidden_size=4096),
    by_name("zai-org/GLM-4.7-Flash", "Glm4MoeLiteForCausalLM", UNSEEN_NAME, hidden_size=2048),
    Published(
        "llava-hf/llava-1.5-7b-hf",
        "LlavaForConditionalGeneration",
        defaults("it"),
        {
            "torch_dtype": "float16",
            "image_token_index": 32000,
            "text_config": {
                **sizes(4096, 11008, 32, 32, 32, 32064, 4096, rms_norm_eps=1e-5),
                "model_type": "llama",
            },
            "vision_config": {
                "model_type": "clip_vision_model", "hidden_size": 1024, "intermediate_size": 4096,
                "num_hidden_layers": 24, "num_attention_heads": 16, "image_size": 336, "patch_size": 14,
            },
        },
        processor={"image_processor_type": "CLIPImageProcessor"},
    ),
    Published(
        "Qwen/Qwen2.5-VL-7B-Instruct",
        "Qwen2_5_VLForConditionalGeneration",
        f"{defaults('Qwen2-VL-7B')}; sizes of the text model not seen",
        {
            **sizes(3584, 18944, 28, 28, 4, 152_064, 128_000, **QWEN),
            "image_token_id": 151_655,
            "video_token_id": 151_656,
            "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
            "vision_config": {"out_hidden_size": 3584, "patch_size": 14, "spatial_merge_size": 2},
        },
        processor={
            "image_processor_type": "Qwen2VLImageProcessor", "patch_size": 14, "temporal_patch_size": 2,
            "merge_size": 2, "min_pixels": 3136, "max_pixels": 12_845_056,
        },
    ),
    by_name("state-spaces/mamba-2.8b-hf", "MambaForCausalLM", defaults("it"), hidden_size=2560),
    by_name("tiiuae/Falcon-H1-1.5B-Deep-Instruct", "FalconH1ForCausalLM", defaults("it"), hidden_size=2048),
    by_name("CohereForAI/c4ai-command-r-v01", "CohereForCausalLM", defaults("it"), hidden_size=8192),
    by_name("meta-llama/Llama-4-Scout-17B-16E", "Llama4ForConditionalGeneration", defaults("it")),
)  # fmt: skip

HEAD = """# Published checkpoints

This page lists which checkpoints load, judging by the values of their `config.json` and the names of their tensors.
Weights of these sizes were not run here: for each row a test (`tests/unit/checkpoint/test_published.py`) reads the
config at its full size, and loads a replica of a few small layers with the published names (for LLaVA and Qwen2.5-VL,
it only reads the config). `tests/unit/checkpoint/published.py` prints this page.

The last column says where the values were read. A row marked "not seen" may differ from the file. Draft models are in
`models.md`. A refused row quotes the beginning of the error.

| checkpoint | architecture | result | values from |
|---|---|---|---|
"""


def page() -> str:
    """Return the content of docs/checkpoints.md."""
    lines = []
    for each in PUBLISHED:
        text = each.architecture.endswith("ForConditionalGeneration") and each.architecture in FAMILIES
        loads = "loads (text and images)" if each.processor else "loads (text only)" if text else "loads"
        result = f"refused: {each.refused}" if each.refused else loads
        lines.append(f"| `{each.name}` | `{each.architecture}` | {result} | {each.source} |")
    return HEAD + "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(page(), end="")
