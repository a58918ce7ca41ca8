"""Options of other servers: each is refused with what tandem has in its place, or with the word that it has nothing.

Some ask for one of the sixteen things beside which prefill graphs cannot be had (row B3). What tandem does not have
turns nothing off: it is refused here, by name, and `rule` is its number in that row.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Foreign:
    """What SGLang and vLLM call one thing, wherever it stands in a file."""

    names: tuple[str, ...]
    answer: str  # what it is here, and what to write instead
    rule: int | None = None


NONE_HERE = "tandem has none; leave it out"

FOREIGN: tuple[Foreign, ...] = (
    Foreign(
        ("disable_cuda_graph",),
        "it means the graphs of decode steps alone; write decode.graphs: none (prefill.graphs is of prompts)",
    ),
    Foreign(("disable_piecewise_cuda_graph",), "write prefill.graphs: none"),
    Foreign(("enforce_piecewise_cuda_graph",), "write prefill.enforce_graphs"),
    Foreign(("enforce_eager",), "write prefill.graphs: none and decode.graphs: none"),
    Foreign(
        ("enable_dp_attention", "enable_dp_lm_head", "dp_size", "data_parallel_size"),
        "attention in data-parallel ranks: tandem has none; name more nodes under prefill.nodes or decode.nodes",
        2,
    ),
    Foreign(
        ("enable_torch_compile", "torch_compile_max_bs", "compilation_config"),
        "torch.compile is of the target's prompts alone, split at attention; write prefill.graphs: piecewise, and "
        "prefill.compiler: inductor for its kernels",
        3,
    ),
    Foreign(("pp_size", "pipeline_parallel_size"), f"pipeline stages: {NONE_HERE}", 4),
    Foreign(
        ("moe_a2a_backend", "enable_deepep_moe", "all2all_backend", "ep_size", "enable_expert_parallel"),
        f"an all-to-all of experts: {NONE_HERE}",
        6,
    ),
    Foreign(
        ("enable_lora", "lora_paths", "lora_modules", "max_loras", "max_lora_rank", "max_loras_per_batch"),
        f"LoRA adapters: {NONE_HERE}, or serve a checkpoint that they were merged into",
        7,
    ),
    Foreign(
        ("enable_multimodal", "limit_mm_per_prompt"),
        "a model takes images where its checkpoint has a vision part that tandem knows; see router.images for limits",
        8,
    ),
    Foreign(
        ("load_format", "quantization"),
        "weights are safetensors in float32, bfloat16 or float16, GGUF and quantized ones are not read; convert them, "
        "and leave it out",
        9,
    ),
    Foreign(("dllm_algorithm", "dllm_algorithm_config"), f"diffusion of text: {NONE_HERE}", 10),
    Foreign(
        ("cpu_offload_gb", "enable_hierarchical_cache", "hicache_ratio", "hicache_size", "swap_space"),
        "weights and cached pages stay on the node's device; leave it out (decode.backup_mib is of retracted requests)",
        11,
    ),
    Foreign(("enable_deterministic_inference",), f"kernels apart for fixed results: {NONE_HERE}", 12),
    Foreign(
        ("disaggregation_mode",),
        "a node's role is where it is named, prefill.nodes or decode.nodes; it has the graphs of its role",
        13,
    ),
    Foreign(("enable_symm_mem",), f"symmetric memory: {NONE_HERE}", 14),
    Foreign(
        ("enable_eplb", "expert_distribution_recorder_mode", "enable_expert_distribution_metrics"),
        f"a balance or a record of experts: {NONE_HERE}",
        15,
    ),
    Foreign(
        (
            "attn_cp_size",
            "dcp_size",
            "context_parallel_size",
            "prefill_context_parallel_size",
            "decode_context_parallel_size",
        ),
        f"prompts or pages split over ranks: {NONE_HERE}",
        16,
    ),
    Foreign(("enable_two_batch_overlap", "enable_dbo"), f"batches in two overlapping halves: {NONE_HERE}"),
    Foreign(("enable_return_hidden_states",), f"answers with hidden states: {NONE_HERE}"),
    Foreign(("tp_size", "tensor_parallel_size"), f"layers split over devices: {NONE_HERE}"),
)


def foreign_answer(key: str) -> str | None:
    """What to say of a key that is another server's, as `enable_lora` or `--enable-lora`; None: it is not."""
    name = key.lstrip("-").replace("-", "_").lower()
    answer = next((each.answer for each in FOREIGN if name in each.names), None)
    return None if answer is None else f"it is an option of other servers: {answer}"
