"""Options of other servers: each is refused with tandem's key for it, or with the information that there is none."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Foreign:
    """The names of SGLang and vLLM for one feature, in any section of a file."""

    names: tuple[str, ...]
    answer: str  # the feature in tandem, and what to write instead


NONE_HERE = "tandem has none yet; leave it out"

FOREIGN: tuple[Foreign, ...] = (
    Foreign(
        ("disable_cuda_graph",),
        "it means the graphs of decode steps; write decode.graphs: none (prefill.graphs is for prompts)",
    ),
    Foreign(("disable_piecewise_cuda_graph",), "write prefill.graphs: none"),
    Foreign(("enforce_piecewise_cuda_graph",), "write prefill.enforce_graphs"),
    Foreign(("enforce_eager",), "write prefill.graphs: none and decode.graphs: none"),
    Foreign(
        ("enable_dp_attention", "enable_dp_lm_head", "dp", "dp_size", "data_parallel_size"),
        "attention in data-parallel ranks: tandem has none; name more nodes under prefill.nodes or decode.nodes",
    ),
    Foreign(
        ("enable_torch_compile", "torch_compile_max_bs", "compilation_config"),
        "torch.compile is for prompts of the target model, split at attention; write prefill.graphs: piecewise, and "
        "prefill.compiler: inductor for its kernels",
    ),
    Foreign(("pp", "pp_size", "pipeline_parallel_size"), f"pipeline stages: {NONE_HERE}"),
    Foreign(
        (
            "moe_a2a_backend",
            "enable_deepep_moe",
            "all2all_backend",
        ),
        f"an all-to-all of experts: {NONE_HERE}",
    ),
    Foreign(
        ("enable_lora", "lora_paths", "lora_modules", "max_loras", "max_lora_rank", "max_loras_per_batch"),
        f"LoRA adapters: {NONE_HERE}, or serve a checkpoint that they were merged into",
    ),
    Foreign(
        ("enable_multimodal", "limit_mm_per_prompt"),
        "a model takes images where its checkpoint has a vision part that tandem knows; see router.images for limits",
    ),
    Foreign(
        ("load_format",),
        "weights must be safetensors in float32, bfloat16, float16 or FP8; GGUF and other quantized ones are not read; "
        "write model.quantization: fp8 to quantise weights at load time, else leave it out",
    ),
    Foreign(("dllm_algorithm", "dllm_algorithm_config"), f"diffusion of text: {NONE_HERE}"),
    Foreign(("cpu_offload_gb",), "weights stay on the node's device; leave it out"),
    Foreign(("enable_deterministic_inference",), f"separate kernels for fixed results: {NONE_HERE}"),
    Foreign(
        ("disaggregation_mode",),
        "a node's role is where it is named, prefill.nodes or decode.nodes; it has the graphs of its role",
    ),
    Foreign(("enable_symm_mem",), f"symmetric memory: {NONE_HERE}"),
    Foreign(
        ("enable_eplb", "expert_distribution_recorder_mode", "enable_expert_distribution_metrics"),
        f"a balance or a record of experts: {NONE_HERE}",
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
    ),
    Foreign(("enable_two_batch_overlap", "enable_dbo"), f"batches in two overlapping halves: {NONE_HERE}"),
    Foreign(("enable_return_hidden_states",), "write model.return_hidden_states: true"),
    Foreign(
        ("tp", "tp_size", "tensor_parallel_size"),
        "write `tensor_parallel: N` in the entry of each node under prefill.nodes and decode.nodes, or `devices: "
        "[cuda:0, cuda:1]` with one for each rank; nodes may differ",
    ),
    Foreign(
        ("ep", "ep_size", "enable_expert_parallel"),
        "write `expert_parallel: true` beside `tensor_parallel: N` in a node's entry: its ranks have whole experts",
    ),
    # memory and batches
    Foreign(
        ("gpu_memory_utilization", "mem_fraction_static", "mem_fraction"),
        "write prefill.memory_fraction and decode.memory_fraction, the share of its GPU that each node takes",
    ),
    Foreign(
        ("max_num_seqs", "max_running_requests", "max_batch_size"),
        "write decode.max_running, the requests in one decode step (prefill.max_batch: prompts in one forward)",
    ),
    Foreign(
        ("chunked_prefill_size", "max_num_batched_tokens", "max_prefill_tokens", "enable_chunked_prefill"),
        "prompts are always computed in chunks; write prefill.chunk_tokens, the tokens of one forward",
    ),
    Foreign(
        ("enable_hierarchical_cache", "hicache_ratio", "hicache_size", "kv_offloading_size", "swap_space"),
        "write prefill.host_mib and decode.host_mib, the host memory of each node for cached prefixes "
        "(decode.backup_mib: that of decode nodes for retracted requests)",
    ),
    Foreign(("block_size",), "write kv.page_size, the tokens of one page"),
    Foreign(
        ("num_gpu_blocks_override", "max_total_tokens", "kv_cache_memory_bytes"),
        "write prefill.pool_tokens and decode.pool_tokens, the KV pool of each node in tokens",
    ),
    Foreign(
        ("kv_cache_dtype",),
        "write kv.dtype: fp8, which stores keys and values as e4m3, or auto, in the type that the model computes in",
    ),
    Foreign(
        ("calculate_kv_scales",),
        "kv.dtype: fp8 takes scales from the checkpoint, and 1 where it has none; leave it out",
    ),
    Foreign(
        ("enable_prefix_caching", "disable_radix_cache"), "write prefill.prefix_cache and decode.prefix_cache"
    ),
    Foreign(
        ("cuda_graph_max_bs", "cuda_graph_bs", "cuda_graph_sizes", "cudagraph_capture_sizes"),
        "which batches are captured follows from decode.max_running and prefill.chunk_tokens; leave it out",
    ),
    Foreign(
        ("attention_backend", "prefill_attention_backend", "decode_attention_backend", "sampling_backend"),
        "kernels follow from the device and the model; leave it out",
    ),
    Foreign(
        ("schedule_policy", "scheduling_policy", "schedule_conservativeness"),
        "the shortest remaining prompt goes first, and waiting requests age; leave it out (decode.reserved_tokens says "
        "how much room admission keeps free)",
    ),
    Foreign(
        ("async_scheduling", "disable_overlap_schedule", "num_scheduler_steps"),
        "GPU nodes always launch a step before they read the one before; leave it out",
    ),
    Foreign(
        ("kv_events_config", "enable_kv_cache_events"),
        "write kv_events.enabled: true; the section kv_events has the other keys",
    ),
    # the model
    Foreign(("served_model_name",), "write model.served_name"),
    Foreign(("context_length", "max_seq_len", "max_seq_len_to_capture"), "write model.max_model_len"),
    Foreign(
        ("trust_remote_code", "model_impl"),
        "code that comes with a checkpoint is never run; leave it out (an architecture that tandem does not know is "
        "refused by name)",
    ),
    Foreign(
        ("tokenizer", "tokenizer_path", "tokenizer_mode", "skip_tokenizer_init"),
        "the tokenizer is read from model.path (tokenizer.json); leave it out",
    ),
    Foreign(("chat_template_content_format",), "it is detected from the chat template; leave it out"),
    Foreign(
        ("revision", "download_dir"),
        "model.path is a directory; deploy/up ORG/NAME --revision REV downloads to the Hugging Face cache (HF_HOME)",
    ),
    Foreign(
        ("hf_overrides", "json_model_override_args", "rope_scaling", "rope_theta"),
        "config.json is read as it is; change it in a copy of the model directory",
    ),
    Foreign(
        ("generation_config", "override_generation_config"),
        "defaults for sampling come from generation_config.json; change it in a copy of the model directory",
    ),
    # speculation
    Foreign(
        ("speculative_config", "speculative_algorithm", "speculative_algo"),
        "write speculation.algorithm, speculation.draft_model_path and speculation.steps",
    ),
    Foreign(("speculative_draft_model_path", "speculative_model"), "write speculation.draft_model_path"),
    Foreign(("speculative_num_steps", "num_speculative_tokens"), "write speculation.steps"),
    Foreign(("speculative_eagle_topk",), "write speculation.topk"),
    Foreign(("speculative_num_draft_tokens",), "write speculation.draft_tokens"),
    # nodes and transfers
    Foreign(
        (
            "kv_transfer_config",
            "disaggregation_transfer_backend",
            "disaggregation_bootstrap_port",
            "disaggregation_ib_device",
        ),
        "pages always move from prefill nodes to decode nodes; write transfer.transport, and for nixl "
        "transfer.nixl_devices",
    ),
    Foreign(
        ("device", "base_gpu_id", "gpu_id_step"),
        "write the `device` of each node under prefill.nodes and decode.nodes, or `devices`, one for each of its ranks",
    ),
    Foreign(
        ("nnodes", "node_rank", "dist_init_addr", "master_addr", "distributed_executor_backend"),
        "name the nodes of all hosts under prefill.nodes and decode.nodes, with addresses, and start each process with "
        "its script",
    ),
    # the API
    Foreign(
        ("api_key", "admin_api_key"),
        "write security.api_keys: FILE, and make the file with deploy/api_key ID FILE",
    ),
    Foreign(("ssl_certfile",), "write router.tls.cert"),
    Foreign(("ssl_keyfile",), "write router.tls.key"),
    Foreign(("ssl_ca_certs",), "write router.tls.client_ca"),
    Foreign(("allowed_origins",), "write router.cors_origins"),
    Foreign(
        ("tool_call_parser", "enable_auto_tool_choice", "reasoning_parser", "enable_reasoning"),
        "tool calls and reasoning are parsed without it, in the format of the model's family; leave it out",
    ),
    Foreign(("tool_server",), f"tools that the server runs: {NONE_HERE}"),
    Foreign(
        ("guided_decoding_backend", "grammar_backend", "structured_outputs_config"),
        "llguidance always serves structured output, which is part of a request (`response_format`); leave it out",
    ),
    Foreign(("seed", "random_seed"), "a seed is part of a request (`seed`); leave it out"),
    Foreign(
        ("enable_metrics",), "/metrics always exists (security.open_metrics: true opens it without a key)"
    ),
    Foreign(
        ("disable_log_requests", "enable_log_requests", "log_requests", "disable_log_stats"),
        "write process.log_level; GET /requests/ID shows what happened to a request",
    ),
    Foreign(("watchdog_timeout",), "write health.loop_timeout"),
    Foreign(("enable_sleep_mode", "enable_memory_saver"), f"memory given back while idle: {NONE_HERE}"),
    Foreign(("is_embedding", "runner", "task", "pooler_config"), f"embeddings as answers: {NONE_HERE}"),
)


def foreign_answer(key: str) -> str | None:
    """Return the answer for a key of another server, such as `enable_lora` or `--enable-lora`; None for other keys."""
    name = key.lstrip("-").replace("-", "_").lower()
    answer = next((each.answer for each in FOREIGN if name in each.names), None)
    return None if answer is None else f"it is an option of other servers: {answer}"
