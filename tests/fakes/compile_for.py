"""Compiles what launchers would launch on other GPUs, on a machine without one. It runs as a process of its own:

    python -m tests.fakes.compile_for 90 80     prints a line of JSON per launch, then the names of all kernels

The arguments are compute capabilities (`GPUS`). All kernels are compiled for the first one, and for the others those
whose tiles are reduced to fit into shared memory. With TANDEM_EXPLORE=1 they are launched with more shapes and types.

The Triton interpreter accepts what the compiler refuses: tiles of odd sizes, mismatched types, more shared memory than
a multiprocessor has. TRITON_INTERPRET must not be set.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import pkgutil
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

import common.engine.ops
from common.engine.ops import expert_weights, fp8_gated, fp8_product, linear, linear_norm
from common.engine.ops.best_tokens import best_tokens_triton
from common.engine.ops.converted_pages import converted_pages_triton
from common.engine.ops.decode_attention import decode_triton
from common.engine.ops.delta_chunks import delta_extend_triton
from common.engine.ops.delta_tiles import ChunkTiles
from common.engine.ops.delta_tokens import delta_step_triton
from common.engine.ops.expert_products import expert_parts_triton
from common.engine.ops.expert_tiles import ExpertTiles
from common.engine.ops.extend_attention import extend_triton
from common.engine.ops.few_experts import add_experts_triton
from common.engine.ops.filter_floor import filter_floor_triton
from common.engine.ops.fp8_codes import FP8, empty_scales
from common.engine.ops.fp8_gated import fp8_gated_cuda
from common.engine.ops.fp8_grouped import fp8_expert_parts_triton
from common.engine.ops.fp8_linear import fp8_product_cuda
from common.engine.ops.fp8_linear_norm import fp8_product_norm_quantized_cuda
from common.engine.ops.fp8_rms_norm import fp8_add_rms_norm_triton, fp8_rms_norm_triton
from common.engine.ops.fp8_rows import quantize_rows_triton, quantize_with_triton
from common.engine.ops.fp8_tiles import Fp8Tiles
from common.engine.ops.held_requests import hold_requests_triton
from common.engine.ops.hopper_attention import hopper_extend
from common.engine.ops.keep_hidden import keep_hidden_triton
from common.engine.ops.key_parts import PROGRAMS_PER_PROCESSOR
from common.engine.ops.mask_logits import mask_logits_triton
from common.engine.ops.output_norm import add_normed_rms_norm_triton, add_normed_triton
from common.engine.ops.peer_memories import RankMemories
from common.engine.ops.peer_reduce import (
    peer_gather_triton,
    peer_sum_fp8_rms_norm_triton,
    peer_sum_rms_norm_triton,
    peer_sum_triton,
)
from common.engine.ops.penalise import penalise_triton
from common.engine.ops.rms_norm import add_rms_norm_triton, rms_norm_triton
from common.engine.ops.rotary import rotary_angles_by_axis_triton, rotary_angles_triton
from common.engine.ops.rotary_decode import rotary_decode_triton
from common.engine.ops.rotary_kv_write import rotary_kv_write_triton, rotary_qk_triton
from common.engine.ops.round_inputs import gather_rows_triton, window_places_triton
from common.engine.ops.route import route_triton
from common.engine.ops.sample_tokens import sample_tokens_triton
from common.engine.ops.shared_memory import H200, SharedMemory, attention_bytes
from common.engine.ops.sigmoid_gate import sigmoid_gate_triton
from common.engine.ops.silu_mul import gelu_mul_triton, silu_mul_triton
from common.engine.ops.step_rows import advance_rows_triton, step_rows_triton
from common.engine.ops.sum_parts import sum_parts_rms_norm_triton, sum_parts_triton
from common.engine.ops.tiles import Tiles
from common.engine.ops.token_norm import token_norm_triton
from common.engine.ops.top_tokens import top_tokens_triton
from common.engine.ops.triton_kernel import report_compilations
from common.engine.ops.verify_attention import verify_triton
from common.engine.ops.vocabulary_rows import vocabulary_rows_triton
from common.engine.ops.write_mark import write_mark_triton
from kv_transfer.transport.cuda import pages as cuda_pages
from tests.fakes.late_loads import late_loads
from tests.fakes.pools import layers_layout
from tests.fakes.racing_stores import early_counts, racing_stores
from tests.fakes.serialised_products import serialised_products

HIDDEN, INNER, VOCAB, HEADS, KV_HEADS, PAGE = 4096, 14336, 128256, 32, 8, 16  # Llama-3.1-8B
BF16 = torch.bfloat16
EXPLORE = "TANDEM_EXPLORE" in os.environ
SOME = (False, True) if EXPLORE else (True,)


class Gpu(NamedTuple):
    """A GPU. Shared memory is from the CUDA C++ programming guide, technical specifications per compute capability."""

    processors: int
    room: SharedMemory


GPUS = {
    80: Gpu(108, SharedMemory(163 << 10, False)),  # A100
    86: Gpu(82, SharedMemory(99 << 10, False)),  # RTX 3090
    89: Gpu(128, SharedMemory(99 << 10, False)),  # RTX 4090
    90: Gpu(132, H200),
    100: Gpu(148, SharedMemory(227 << 10, True)),  # B200
    120: Gpu(170, SharedMemory(99 << 10, False)),  # RTX 5090
}


class NoGpu:
    """A driver that answers Triton's queries before compilation. The compute capability is the device number."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return self._capability

    def get_current_stream(self, device: int) -> int:
        return 0


def install(compiled: Callable[[JITFunction, dict[str, Any], int, Any], None]) -> None:
    """Make every launch compile and stop there, and then call `compiled`.

    Each is also reported as on a node, for which Triton writes its arguments as JSON.

    It is called with the kernel, its options, the element size of its first tensor in bytes, and the result.
    """
    run = JITFunction.run

    def compile_alone(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        first = next(each for each in args if isinstance(each, Tensor))
        compiled(self, options, first.element_size(), run(self, *args, grid=grid, warmup=True, **options))

    JITFunction.run = compile_alone


def assemble_once() -> None:
    """Let ptxas see each kernel once for each GPU, which takes a third of the time.

    Its other forms have the same instructions of the source, and Triton checks those of its own.
    """
    assemble, seen = CUDABackend.make_cubin, set[tuple[str, int]]()

    def make_cubin(self: CUDABackend, src: str, metadata: dict[str, Any], opt: Any, capability: int) -> bytes:
        kernel = metadata["name"], capability
        if kernel in seen:
            return b""
        seen.add(kernel)
        made: bytes = assemble(self, src, metadata, opt, capability)
        return made

    CUDABackend.make_cubin = make_cubin


def become(capability: int) -> None:
    """Make launchers find this GPU."""
    gpu = GPUS[capability]
    answers = {
        "chained": {"CHAINED": True, "launch_pdl": True} if capability >= 90 else {"CHAINED": False},
        "multiprocessors": gpu.processors,
        "room_of": gpu.room,
        "has_fp8": capability >= 89,
    }
    driver.set_active(NoGpu(capability))
    for product in (linear, expert_weights, fp8_product, fp8_gated):
        setattr(product, "copies_in_bulk", lambda *matrices: capability >= 90)  # noqa: B010
    for module in kernel_modules():
        for name, answer in answers.items():
            if hasattr(module, name):
                setattr(module, name, lambda device, answer=answer: answer)


def expected_bytes(kernel: str, options: dict[str, Any], itemsize: int, room: SharedMemory) -> int | None:
    """Return the shared memory that the choice of tiles assumes, if it assumes any."""
    if kernel == "_linear_kernel":
        names = ("BLOCK_N", "BLOCK_K", "num_warps", "num_stages", "ROWS")
        tiles = Tiles(*(options[name] for name in names))._replace(rest=options["REST"])
        return tiles.shared_bytes(matrices=2 if options["GATED"] else 1)
    if kernel in ("_fp8_product_kernel", "_fp8_gated_kernel"):
        if options.get("DECODED"):
            return None
        sizes = (options[name] for name in ("BLOCK_N", "BLOCK_K", "num_warps", "num_stages", "ROWS"))
        return Fp8Tiles(*sizes).shared_bytes(matrices=2 if options.get("GATED") else 1)
    if kernel == "_fp8_grouped_kernel":
        sizes = (options[name] for name in ("COLUMNS", "BLOCK_K", "num_warps", "num_stages", "ROWS"))
        return Fp8Tiles(*sizes).shared_bytes(
            matrices=2 if options["GATED"] and options["TOGETHER"] == 1 else 1
        )
    if kernel in ("_few_pairs_kernel", "_grouped_product_kernel"):
        rows = options["TOKENS" if kernel == "_few_pairs_kernel" else "ROWS"]
        tile = (options["COLUMNS"], options["BLOCK_K"], rows, options["num_warps"], options["num_stages"])
        return ExpertTiles(*tile, extra=options.get("EXTRA", 0)).shared_bytes(itemsize, options["GATED"])
    if kernel in ("delta_solve_kernel", "delta_scan_kernel", "delta_outputs_kernel"):
        return chunk_bytes(kernel, options, itemsize)
    if kernel in ("_decode_kernel", "_verify_kernel", "extend_kernel"):
        rows = options["ROWS"] if "ROWS" in options else options["TOKENS"] * options["GROUP"]
        keys = (
            options["BLOCK_N"] if options.get("BITS", True) else max(options["BLOCK_N"], options["BLOCK_W"])
        )
        return attention_bytes(rows, keys, options["num_stages"], options["D"], itemsize, room)
    return None


def chunk_bytes(kernel: str, options: dict[str, Any], itemsize: int) -> int:
    stages = options.get("num_stages", 1)
    part, step = options.get("PART", 16), options.get("STEP", 16)
    sizes = options["BLOCK_K"], options["BLOCK_V"], options["CHUNK"]
    tiles = ChunkTiles(*sizes, part=part, scan_stages=stages, step=step, output_stages=stages)
    return {
        "delta_solve_kernel": tiles.solve_bytes,
        "delta_scan_kernel": tiles.scan_bytes,
        "delta_outputs_kernel": tiles.output_bytes,
    }[kernel](itemsize)


def kernel_modules() -> list[Any]:
    names = [f"common.engine.ops.{each.name}" for each in pkgutil.iter_modules(common.engine.ops.__path__)]
    return [*map(importlib.import_module, names), cuda_pages]


def kernels() -> set[str]:
    """Return the names of all launched kernels, without the Triton functions that they call."""
    return {
        f"{module.__name__}.{name}"
        for module in kernel_modules()
        for name, value in vars(module).items()
        if isinstance(value, JITFunction) and name.endswith("_kernel") and value.module == module.__name__
    }


def attention(
    dim: int,
    dtype: torch.dtype,
    window: int | None,
    tokens: int,
    requests: int,
    stored: torch.dtype | None = None,
    prompt: bool = True,
) -> None:
    """Launch a prompt, a plain step and a verification over one pool, which may store another dtype than queries'.

    `prompt`: launch the first of these, too.
    """
    plane = torch.zeros(70, PAGE, KV_HEADS, dim, dtype=stored or dtype)
    lens, table = torch.zeros(requests, dtype=torch.int32), torch.zeros(requests, 70, dtype=torch.int32)
    starts = torch.zeros(requests + 1, dtype=torch.int32)
    query = torch.zeros(tokens, HEADS, dim, dtype=dtype)
    if prompt:
        extend_triton(query, plane, plane, table, starts, lens, window, 0.1)
    decode_triton(query[:requests], plane, plane, table, lens, 1024, window, 0.1)
    mask = torch.ones(requests, 4, 4, dtype=torch.bool)
    verify_triton(query[: 4 * requests], plane, plane, table, lens, mask, 1024, window, 0.1)


def hopper(dim: int, tokens: int, page: int, pages: int = 70) -> None:
    """Launch a prompt of one request by the kernel for Hopper GPUs."""
    plane = torch.zeros(pages, page, KV_HEADS, dim, dtype=BF16)
    table, starts = torch.zeros(1, 70, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    hopper_extend(torch.zeros(tokens, HEADS, dim, dtype=BF16), plane, plane, table, starts, table[:, 0], 0.1)


def tight(gpu: Gpu) -> None:
    """Launch what needs the most shared memory: tiles of at least 64 rows, and two weights at once."""
    requests, tokens = PROGRAMS_PER_PROCESSOR * gpu.processors // KV_HEADS, 24 * gpu.processors
    lens, table = torch.zeros(requests, dtype=torch.int32), torch.zeros(requests, 70, dtype=torch.int32)
    plane = torch.empty(70, PAGE, KV_HEADS, 256, dtype=BF16)
    query = torch.empty(16 * requests, HEADS, 256, dtype=BF16)
    mask = torch.ones(requests, 16, 80, dtype=torch.bool)  # more slots than a word has bits
    verify_triton(query, plane, plane, table, lens, mask, 1024, None, 0.1)
    query, planes = torch.empty(tokens, HEADS, 64, dtype=BF16), plane.view(280, PAGE, KV_HEADS, 64)
    starts = torch.zeros(requests + 1, dtype=torch.int32)
    extend_triton(query, planes, planes, table, starts, lens, None, 0.1)
    size = 32 * gpu.processors  # one program per processor for each of two parts
    stream, down = torch.zeros(64, size, dtype=BF16), torch.empty(size, INNER, dtype=BF16)
    linear_norm.linear_add_rms_norm_cuda(
        torch.zeros(64, INNER, dtype=BF16), down, None, stream, stream[0], 1e-5
    )
    x, weights = torch.zeros(128, HIDDEN, dtype=BF16), torch.empty(4 * size, HIDDEN, dtype=BF16)
    linear._linear_cuda(x, weights[: 2 * size], None)
    linear._gated_linear_cuda(x[:16], weights, None)
    codes, scales, weight = (
        torch.zeros(64, HIDDEN).to(FP8),
        torch.zeros(64, 1),
        torch.empty(2 * size, HIDDEN, dtype=FP8),
    )
    fp8_gated_cuda(codes, scales, weight, weight_scales(weight, False), None, "silu", BF16)
    fp8_product_cuda(codes, scales, weight, weight_scales(weight, False), None, BF16)
    gated_delta(BF16, steps=(), save=SOME)  # they take little shared memory
    gate_up, down = torch.empty(8, 256, 512, dtype=BF16), torch.empty(8, 512, 128, dtype=BF16)
    for tokens in (64, 1024):
        x, shares = torch.zeros(tokens, 512, dtype=BF16), torch.zeros(tokens, 8)
        expert_parts_triton(x, gate_up, down, torch.zeros(tokens, 8, dtype=torch.int32), shares)


def body(dtype: torch.dtype) -> None:
    """Launch the kernels between attention and matrix products, and products of few rows."""
    x, weight = torch.zeros(4, HIDDEN, dtype=dtype), torch.zeros(HIDDEN, dtype=dtype)
    for gain, ranks in ((weight, 2), (weight.float(), 8)):
        rms_norm_triton(x, gain, 1e-5)
        add_rms_norm_triton(x, x, gain, 1e-5)
        add_normed_triton(x, x, gain, 1e-5)
        add_normed_rms_norm_triton(x, x, gain, gain, 1e-5)
        token_norm_triton(torch.zeros(4, 3 * HIDDEN, dtype=dtype), gain, gain, 1e-5)
        addresses, host = torch.zeros(ranks, dtype=torch.int64), torch.zeros(2, dtype=torch.int32)
        memory = RankMemories(addresses, host, 1, 1 << 20)
        peer_gather_triton(x, memory)
        for rows in (x, torch.zeros(65, HIDDEN, dtype=dtype)):
            peer_sum_triton(rows, memory)
            peer_sum_rms_norm_triton(rows, rows, gain, 1e-5, memory)
            peer_sum_fp8_rms_norm_triton(rows, rows, gain, 1e-5, ranks > 2, memory)
    for activate in (silu_mul_triton, gelu_mul_triton):
        activate(torch.zeros(4, 2 * INNER, dtype=dtype))
    sigmoid_gate_triton(x, torch.zeros(4, 3 * HIDDEN, dtype=dtype)[:, HIDDEN : 2 * HIDDEN])
    gain = torch.zeros(128, dtype=dtype)
    more = ((None, 32), (gain, 128)) if EXPLORE else ()
    for norm, dims in ((None, 128), (gain.float(), 32), *more):
        qkv, plane = torch.zeros(4, 48, 128, dtype=dtype), torch.zeros(3, PAGE, KV_HEADS, 128, dtype=dtype)
        angles = torch.zeros(4, 1, dims, dtype=dtype)
        slots = torch.zeros(4, dtype=torch.int64)
        rotary_kv_write_triton(qkv, angles, angles, norm, norm, 1e-5, plane, plane, slots)
        rest = plane, plane, torch.zeros(4, 70, dtype=torch.int32), slots.int(), 1024, None, 0.1
        rotary_decode_triton(qkv[:, :40], angles, angles, norm, norm, 1e-5, slots, *rest)
    wide = torch.zeros(4, 1, 80)
    rotary_qk_triton(torch.zeros(4, 3, 16, 80, dtype=dtype), wide, wide)  # shape of Qwen2.5-VL's tower
    frequencies = torch.zeros(64)
    rotary_angles_triton(torch.zeros(4, dtype=torch.int64), frequencies, 1.0, dtype)
    places, axes = torch.zeros(4, 3, dtype=torch.int64), torch.zeros(64, dtype=torch.int64)
    rotary_angles_by_axis_triton(places, axes, frequencies, 1.0, dtype)
    if dtype != torch.float32:
        products(dtype)


def products(dtype: torch.dtype) -> None:
    """Launch products of few rows, as many as each tile holds, and of one row."""
    linear._linear_cuda(torch.zeros(1, 2048, dtype=dtype), torch.empty(5120, 2048, dtype=dtype), None)
    gain = torch.zeros(HIDDEN, dtype=dtype)
    for rows, sizes in ((4, (VOCAB, 6144)), (72, (6144,)), (128, (6144,))):
        x = torch.zeros(rows, HIDDEN, dtype=dtype)
        for size in sizes:
            weights = torch.empty(size, HIDDEN, dtype=dtype)  # never touched, so no memory is committed
            linear._linear_cuda(x, weights, None)
        linear._linear_cuda(x, weights, weights[:, 0].contiguous())
        for activation in ("silu", "gelu_tanh"):
            linear._gated_linear_cuda(x, torch.empty(2 * INNER, HIDDEN, dtype=dtype), None, activation)
        for depth in (HIDDEN, INNER):
            wide, down = torch.zeros(rows, depth, dtype=dtype), torch.empty(HIDDEN, depth, dtype=dtype)
            linear_norm.linear_add_rms_norm_cuda(wide, down, None, x, gain, 1e-5)


def eight_bits() -> None:
    """Launch FP8 products with both kinds of scales, and what quantises their inputs."""
    rows = 4
    stream, inner = torch.zeros(rows, HIDDEN, dtype=BF16), torch.zeros(rows, INNER, dtype=BF16)
    fp8_rms_norm_triton(stream, stream[0].float(), 1e-5, True)
    quantize_with_triton(stream, torch.ones(()))
    for blocks in (False, True):
        codes, scales, _ = fp8_add_rms_norm_triton(stream, stream, stream[0], 1e-5, blocks)
        # Weights are never touched, so no memory is committed.
        gate_up, qkv, down = (
            torch.empty(size, depth, dtype=FP8)
            for size, depth in ((2 * INNER, HIDDEN), (6144, HIDDEN), (HIDDEN, INNER))
        )
        of_gates, of_qkv, of_down = (weight_scales(weight, blocks) for weight in (gate_up, qkv, down))
        for many in (codes, torch.zeros(64, HIDDEN, dtype=FP8)):
            of_rows = scales if many is codes else empty_scales(many, HIDDEN, blocks)
            fp8_product_cuda(many, of_rows, qkv, of_qkv, None, BF16)
            fp8_gated_cuda(many, of_rows, gate_up, of_gates, None, "silu", BF16)
        narrow = gate_up[: 2 * HIDDEN]
        fp8_gated_cuda(codes, scales, narrow, weight_scales(narrow, blocks), None, "silu", BF16)
        given = *quantize_rows_triton(inner, blocks), down, of_down, None
        fp8_product_norm_quantized_cuda(*given, stream, stream[0], 1e-5, blocks)
        fp8_gated_cuda(codes[:1], scales[:1], gate_up, of_gates, None, "silu", BF16)
        fp8_product_cuda(codes[:1], scales[:1], qkv, of_qkv, None, BF16)
        # Experts of Qwen3-30B-A3B.
        ups, downs = torch.empty(128, 1536, 2048, dtype=FP8), torch.empty(128, 2048, 768, dtype=FP8)
        of_ups = torch.empty((128, 2, 6, 16) if blocks else (128, 1536))
        of_downs = torch.empty((128, 16, 6) if blocks else (128, 2048))
        for tokens in (4, 4096) if blocks else (1, 4):
            x, chosen = torch.zeros(tokens, 2048, dtype=BF16), torch.zeros(tokens, 8, dtype=torch.int32)
            fp8_expert_parts_triton(x, ups, of_ups, downs, of_downs, None, chosen, chosen.float())


def weight_scales(weight: Tensor, blocks: bool) -> Tensor:
    size, depth = weight.shape
    return torch.empty((size // 128, depth // 128) if blocks else (size,))


def experts(dtype: torch.dtype) -> None:
    """Launch routing and experts of Qwen3-30B-A3B, for few and for many tokens, and DeepSeek-V3's router."""
    count, chosen, inner, hidden = 128, 8, 768, 2048
    gate_up = torch.empty(count, 2 * inner, hidden, dtype=dtype)  # never touched, so no memory is committed
    down = torch.empty(count, hidden, inner, dtype=dtype)
    slots = torch.zeros(4096, dtype=torch.int64)
    for tokens in (1, 16, 64, 4096):
        x, rows = torch.zeros(tokens, hidden, dtype=dtype), torch.empty(count, hidden, dtype=dtype)
        found, shares = route_triton(
            x, rows, None, slots[:tokens], 16, chosen, 0, False, False, 1, 1, True, 0.0, 1.0
        )
        parts = expert_parts_triton(x, gate_up, down, found.zero_(), shares)
        sum_parts_triton(parts, found)
        sum_parts_rms_norm_triton(parts, found, x, rows[0], 1e-6)
    narrow = torch.empty(count, 1024, hidden, dtype=dtype), torch.empty(count, hidden, 512, dtype=dtype)
    by = rows, None, slots[:1], 16, chosen, 0, False, False, 1, 1, True, 0.0, 1.0
    add_experts_triton(x[:1], x[:1], narrow[0], narrow[1], *by)
    x, rows = torch.zeros(4, hidden, dtype=dtype), torch.empty(257, hidden, dtype=dtype)
    correction = torch.zeros(256)
    route_triton(x, rows, correction, None, 0, chosen, 1, True, True, 8, 4, True, 1e-20, 2.5)


def gated_delta(
    dtype: torch.dtype,
    heads: int = 32,
    served: int = 2,
    key: int = 128,
    value: int = 128,
    steps: tuple[int, ...] = (4, 1),
    save: tuple[bool, ...] = (False, True),
) -> None:
    """Launch the prompt form and the step of a gated delta layer, by default of Qwen3.5-35B-A3B.

    `steps`: the numbers of tokens. `save`: whether prompts save states in between.
    """
    channels = 2 * heads // served * key + heads * value
    inputs = channels + 2 * heads
    decay, bias = torch.zeros(2, heads)
    weights = torch.zeros(channels, 4, dtype=dtype), decay, bias, torch.zeros(value)
    conv, recurrent = torch.zeros(3, channels, 3, dtype=dtype), torch.empty(3, heads, key, value)
    projected, row = torch.empty(8, inputs + heads * value, dtype=dtype), torch.zeros(2, dtype=torch.int64)
    starts, lengths = torch.zeros(3, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    saves = torch.zeros(2, 2, 2, dtype=torch.int64)
    for each in save:
        saved = saves if each else None
        delta_extend_triton(projected, *weights, 1e-6, conv, recurrent, row, starts, lengths, saved)
    window = torch.zeros(3, 4, inputs, dtype=dtype)
    for tokens in steps:
        given, places = projected[: 2 * tokens], window[:, :tokens].contiguous()
        delta_step_triton(given, *weights, 1e-6, conv, recurrent, places, row, row, row)


def fp8_pages() -> None:
    """Launch the kernels that write or convert keys and values, over pages that hold FP8."""
    qkv, plane = torch.zeros(4, 48, 128, dtype=BF16), torch.zeros(3, PAGE, KV_HEADS, 128, dtype=FP8)
    angles, slots = torch.zeros(4, 1, 128, dtype=BF16), torch.zeros(4, dtype=torch.int64)
    rotary_kv_write_triton(qkv, angles, angles, None, None, 1e-5, plane, plane, slots)
    rest = plane, plane, torch.zeros(4, 70, dtype=torch.int32), slots.int(), 1024, None, 0.1
    rotary_decode_triton(qkv, angles, angles, None, None, 1e-5, slots, *rest)
    table, starts, lens = torch.zeros(2, 70, dtype=torch.int32), slots[:3].int(), slots[:2].int()
    converted_pages_triton(plane, plane, table, starts, lens, 1.0, 1.0, BF16, 140)
    for tokens in (256, 8192) if EXPLORE else (8192,):  # `attention` has launched the kernel for few tokens
        query = torch.zeros(tokens, HEADS, 128, dtype=BF16)
        extend_triton(query, plane, plane, table, starts, lens, None, 0.1, out=query)


def drawing() -> None:
    """Launch sampling and the state updates of speculation."""
    rows, logits = 4, torch.empty(4, VOCAB)
    values, ids = torch.zeros(rows), torch.zeros(rows, dtype=torch.int64)
    sample_tokens_triton(logits, values, ids, ids, None, True)
    sample_tokens_triton(logits, values, ids, ids, None, False)
    sample_tokens_triton(logits, values, ids, ids, values, False)
    best_tokens_triton(logits, values, ids, ids, 16, True)
    best_tokens_triton(logits, values, ids, ids, 16, False)
    filter_floor_triton(logits, values, ids.int(), values, values)
    mask_logits_triton(logits, torch.zeros(rows, -(-VOCAB // 32), dtype=torch.int32), ids)
    seen = torch.empty(rows, VOCAB, dtype=torch.int32)
    for path in (0, 3):
        paths = torch.zeros(rows, path, dtype=torch.int64)
        penalise_triton(logits, seen, ids, values, values, values, paths)
    for count in (1, 4, 10):
        top_tokens_triton(logits, count)
    pool = torch.zeros(rows, 4, HIDDEN, dtype=BF16)
    write_mark_triton(ids[:1], ids[:1])
    vocabulary_rows_triton(ids, torch.zeros(64, HIDDEN, dtype=BF16), 64)
    keep_hidden_triton(torch.zeros(rows, HIDDEN, dtype=BF16), ids, pool, 1, ids, ids)
    table = torch.zeros(9, 70, dtype=torch.int32)
    placed = torch.zeros(rows, 2, dtype=torch.int64)
    column = torch.zeros(9, dtype=torch.int64)
    gather_rows_triton(placed, column, column, column, table)
    lengths = torch.zeros(9, dtype=torch.int32)
    step_rows_triton(ids, column, lengths, column, table, PAGE)
    starts = torch.zeros(rows + 1, dtype=torch.int32)
    hold_requests_triton(
        table[:rows], starts, lengths[:rows], table, torch.zeros(10, dtype=torch.int32), lengths
    )
    advance_rows_triton(placed[:, 0], ids, lengths[:rows], column, lengths)
    depth = torch.arange(4).expand(rows, -1)
    window_places_triton(ids, ids, table[:rows].contiguous(), depth, 0, PAGE)


def pages() -> None:
    """Launch the copy into another process's pool, with and without checksums."""
    layout = layers_layout("m", "bfloat16", PAGE, 3, [(KV_HEADS, 128)] * 2)
    memory = torch.zeros(layout.total_bytes, dtype=torch.uint8)
    cpu = torch.device("cpu")
    source = cuda_pages.PagedMemory(layout, memory, cpu)
    cuda_pages.move_pages_reference = cuda_pages.move_pages_kernel
    listed: Tensor = cuda_pages.page_list([1, 2], [2, 1], device=cpu)
    sums = torch.zeros(2, dtype=torch.int64)
    for target in (None, source):
        for wanted in (None, sums):
            if target is not None or wanted is not None:
                cuda_pages.move_pages(source, target, listed, wanted, range(len(layout.planes)), 64)


def loads_first(kernel: str, options: dict[str, Any]) -> bool:
    """Return whether a kernel's time depends on its making all loads before its first barrier.

    With scales per block, the up projections' scales are loaded after the sums of the gates.
    """
    return kernel == "_fp8_vector_kernel" and not options["BLOCKS"]


def adds_up_steps(options: dict[str, Any]) -> bool:
    """Return whether a kernel's time depends on steps that do not wait for the matrix units."""
    return options.get("TOGETHER", 1) > 1 and not options.get("DECODED")


def adds_up_parts(options: dict[str, Any]) -> bool:
    """Return whether the last program of a tile adds up the parts of all."""
    # The kernel that only plans parts of prompts has no D.
    return bool(options.get("COMBINED")) or {"D", "MIN_PART"} <= options.keys()


def main(capabilities: list[int]) -> None:
    gc.disable()  # an eighth of the time would be visits of syntax trees
    capability = capabilities[0]

    def tell(function: JITFunction, options: dict[str, Any], itemsize: int, made: Any) -> None:
        name, room = function.fn.__name__, GPUS[capability].room
        launch = {
            "capability": capability,
            "kernel": f"{function.module}.{name}",
            "binary": made.hash,
            "shared": made.metadata.shared,
            "expected": expected_bytes(name, options, itemsize, room),
            "combined": adds_up_parts(options),
            "early": early_counts(made.asm["ptx"]) if adds_up_parts(options) else [],
            "limit": room.shared_bytes,
            "racing": racing_stores(made.asm["ptx"]) if options["num_warps"] > 1 else [],
            "ahead": "cp.async" in made.asm["ptx"],
            "late": late_loads(made.asm["ptx"]) if loads_first(name, options) else [],
            "serialised": serialised_products(made.asm["ptx"])
            if capability == 90 and adds_up_steps(options)
            else [],
        }
        print(json.dumps(launch))

    install(tell)
    assemble_once()
    report_compilations(lambda kernel, seconds: None)
    become(capability)
    # The prompts of the first call have the tiles of the third and fourth one.
    attention(128, BF16, None, tokens=64, requests=1, prompt=EXPLORE)
    attention(128, BF16, None, tokens=2048, requests=64)
    attention(64, BF16, 4096, tokens=64, requests=16)
    attention(128, BF16, None, tokens=256, requests=64, stored=FP8)
    attention(64 if EXPLORE else 32, torch.float32, None, tokens=64, requests=1)
    if capability == 90:
        hopper(128, tokens=2048, page=PAGE)
        hopper(256, tokens=64, page=8)
        hopper(256, tokens=64, page=8, pages=71)
    body(BF16)
    eight_bits()
    fp8_pages()
    gated_delta(BF16)
    few = (4, 1) if EXPLORE else (4,)
    gated_delta(BF16, heads=6, served=3, key=64, value=96, steps=few, save=SOME)
    experts(BF16)
    drawing()
    pages()
    for capability in capabilities[1:]:
        become(capability)
        tight(GPUS[capability])
    print(json.dumps({"kernels": sorted(kernels()), "triton": triton.__version__}))


if __name__ == "__main__":
    sys.exit(main([int(each) for each in sys.argv[1:]]))
