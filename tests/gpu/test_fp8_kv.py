"""Pages in FP8 on a GPU: kernels against references in float64, and chunks of a prompt against the whole of it."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from common.engine.attention import prompt_attention
from common.engine.attention.prompt_attention import PromptAttention
from common.engine.forward.batch import ForwardBatch, ForwardMode
from common.engine.ops.decode_attention import decode_attention, decode_reference, decode_triton
from common.engine.ops.extend_attention import extend_attention
from common.engine.ops.fp8_codes import FP8
from common.engine.ops.key_parts import Division
from common.engine.ops.kv_rounding import as_read, as_stored
from common.engine.ops.rotary_decode import rotary_decode
from common.engine.ops.rotary_kv_write import rotary_kv_write, rotary_kv_write_reference
from common.engine.ops.verify_attention import verify_attention, verify_triton
from common.kv_cache.kv_values import KvValues
from common.kv_cache.pool_spec import PoolSpec
from tests.fakes.pools import attention_planes, empty_pool
from tests.unit.engine.scattered_cache import Cache

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

CUDA = torch.device("cuda")
SCALES = 0.25, 2.0
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 2e-5}


def close(actual: Tensor, expected: Tensor) -> None:
    limit = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual.double().cpu(), expected.double().cpu(), atol=limit, rtol=limit)


class Rig:
    """Requests over pages in FP8, on the CPU for expectations and on the GPU."""

    def __init__(self, lengths: list[int], page_size: int, heads: int, dim: int, dtype: torch.dtype) -> None:
        self.cache = Cache(lengths, page_size, 2, dim, dtype, SCALES)
        self.heads, self.dim, self.dtype = heads, dim, dtype
        self.keys, self.values = self.cache.planes.to(CUDA)
        self.table = self.cache.page_table.to(CUDA)
        self.lengths = torch.tensor(lengths, dtype=torch.int32, device=CUDA)

    def query(self, rows: int) -> Tensor:
        return torch.randn(rows, self.heads, self.dim).to(self.dtype)

    def expect(self, out: Tensor, query: Tensor, new: list[int], window: int | None) -> None:
        for row, (part, asked) in enumerate(zip(out.split(new), query.split(new), strict=True)):
            if len(part):
                close(part, self.cache.expected(row, asked, window))


@pytest.mark.parametrize(
    ("dtype", "heads", "dim", "page_size", "window"),
    [
        (torch.bfloat16, 8, 128, 16, None),
        (torch.bfloat16, 8, 128, 1, 100),
        (torch.float16, 14, 64, 16, None),
        (torch.bfloat16, 2, 80, 64, 100),
        (torch.bfloat16, 8, 256, 16, None),
        (torch.float32, 8, 16, 16, None),
    ],
)
def test_attention(dtype: torch.dtype, heads: int, dim: int, page_size: int, window: int | None) -> None:
    rig = Rig([1, 63, 700, 2000, 130], page_size, heads, dim, dtype)
    scale, scaled = dim**-0.5, functools.partial(_scaled, SCALES)
    places = rig.keys, rig.values, rig.table
    query, several = rig.query(5), Division(7, 64, 2)
    for decode in (decode_attention, functools.partial(decode_triton, division=several)):
        out = scaled(decode)(query.to(CUDA), *places, rig.lengths, 4096, window, scale)
        rig.expect(out, query, [1] * 5, window)

    new = [1, 63, 600, 900, 0]
    query, starts = rig.query(sum(new) + 150), torch.tensor([0, *torch.tensor(new).cumsum(0)]).int()
    out = scaled(extend_attention)(query.to(CUDA), *places, starts.to(CUDA), rig.lengths, window, scale)
    rig.expect(out[: sum(new)], query[: sum(new)], new, window)
    assert not out[sum(new) :].any()

    rig = Rig([8, 63, 700, 2000, 130], page_size, heads, dim, dtype)
    places = rig.keys, rig.values, rig.table
    chain, query = torch.ones(5, 4, 4, dtype=torch.bool, device=CUDA).tril(), rig.query(20)
    for verify in (verify_attention, functools.partial(verify_triton, division=several)):
        out = scaled(verify)(query.to(CUDA), *places, rig.lengths, chain, 4096, window, scale)
        rig.expect(out, query, [4] * 5, window)


def _scaled(scales: tuple[float, float], run: Any) -> Any:
    return functools.partial(run, key_scale=scales[0], value_scale=scales[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("norm", [False, True])
def test_writing(dtype: torch.dtype, norm: bool) -> None:
    """Kernel and reference store the same bytes, except where a rotated key is at the border of two."""
    heads, kv_heads, dim, rows = 32, 8, 128, 200
    qkv = (8 * torch.randn(rows, heads + 2 * kv_heads, dim, device=CUDA)).to(dtype)
    cos, sin = torch.randn(2, rows, 1, dim, device=CUDA).to(dtype)
    weight = torch.ones(dim, dtype=dtype, device=CUDA) if norm else None
    slots = torch.randperm(rows, device=CUDA) + 16
    found = []
    for run in (rotary_kv_write_reference, rotary_kv_write):
        mine, planes = qkv.clone(), torch.zeros(2, 15, 16, kv_heads, dim, device=CUDA).to(FP8)
        run(mine, cos, sin, weight, weight, 1e-6, planes[0], planes[1], slots, *SCALES)
        found.append((mine, planes))
    (read, stored), (kernel_read, kernel_stored) = found
    differ = stored.view(torch.uint8) != kernel_stored.view(torch.uint8)
    assert not differ[1].any(), "values are only rounded"
    assert differ[0].float().mean() < (1e-3 if dtype is torch.float32 else 0.1)
    flat = kernel_stored.view(2, -1, kv_heads, dim)
    for part, plane, scale in zip(kernel_read[:, heads:].chunk(2, 1), flat, SCALES, strict=True):
        assert torch.equal(as_read(plane.view(torch.uint8)[slots].view(FP8), dtype, scale), part)
    assert torch.equal(read[:, heads + kv_heads :], kernel_read[:, heads + kv_heads :])
    large = torch.tensor([1e4, -1e4, 448.0], device=CUDA)
    assert as_stored(large, FP8, 1.0).float().tolist() == [448.0, -448.0, 448.0]


@pytest.mark.parametrize("length", [1, 64, 65, 1000])
def test_a_decode_step_in_one_launch(length: int) -> None:
    rig = Rig([length], 16, 8, 128, torch.bfloat16)
    qkv = torch.randn(1, 12, 128, device=CUDA).to(torch.bfloat16)
    # The reference rounds while it rotates: with larger queries, whose softmax is sharp, that alone shows.
    qkv[:, :8] /= 16
    cos, sin = torch.randn(2, 1, 1, 128, device=CUDA).to(torch.bfloat16)
    slot = int(rig.cache.page_table[0, (length - 1) // 16]) * 16 + (length - 1) % 16
    expected, rotated = (rig.keys.clone(), rig.values.clone()), qkv.clone()
    turn = cos, sin, None, None, 0.0
    rotary_kv_write_reference(rotated, *turn, *expected, torch.tensor([slot], device=CUDA), *SCALES)
    attend: list[Any] = [rig.table, rig.lengths, length, None, 128**-0.5, *SCALES]
    out = rotary_decode(qkv, *turn, torch.tensor([slot], device=CUDA), rig.keys, rig.values, *attend)
    planes = rig.keys, rig.values
    differ = torch.stack(
        [a.view(torch.uint8) != b.view(torch.uint8) for a, b in zip(planes, expected, strict=True)]
    )
    assert not differ[1].any(), "values are only rounded"
    assert differ[0].sum() <= 40, "of 256 new bytes, some are at the border of two"
    close(out, decode_reference(rotated[:, :8], rig.keys, rig.values, *attend))


def test_a_whole_prompt_reads_what_its_chunks_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole prompts are computed over the forward's own keys and values, chunks over pages, converted ones if long.

    A Hopper GPU would read pages for both.
    """
    monkeypatch.setattr(prompt_attention, "hopper_reads", lambda *_: False)
    rows, heads, kv_heads, dim, page = 1024, 8, 2, 128, 16
    values = KvValues("float8_e4m3fn", {(0, "k"): 0.25, (0, "v"): 2.0})
    planes = attention_planes("target", 1, kv_heads, dim, "bfloat16")
    spec = PoolSpec(page, tuple(values.stored(plane) for plane in planes))
    pool = empty_pool(spec, rows // page + 1, CUDA)
    attention = PromptAttention(pool, [None], (rows,))
    qkv = torch.randn(rows, heads + 2 * kv_heads, dim, device=CUDA).to(torch.bfloat16)
    cos, sin = torch.ones(rows, 1, dim, device=CUDA), torch.zeros(rows, 1, dim, device=CUDA)
    angles = cos.to(torch.bfloat16), sin.to(torch.bfloat16)
    pages = torch.arange(1, rows // page + 1, dtype=torch.int32, device=CUDA)[None]
    outs = []
    for chunk in (rows, 256, 768):
        parts = []
        for begin in range(0, rows, chunk):
            end = min(begin + chunk, rows)
            new = end - begin
            attention.plan(
                ForwardBatch(
                    mode=ForwardMode.EXTEND,
                    input_ids=torch.zeros(new, dtype=torch.int64, device=CUDA),
                    positions=torch.arange(begin, end, device=CUDA),
                    kv_slots=torch.arange(page + begin, page + end, device=CUDA),
                    page_table=pages,
                    seq_lens=torch.tensor([end], dtype=torch.int32, device=CUDA),
                    query_start=torch.tensor([0, new], dtype=torch.int32, device=CUDA),
                    logits_rows=torch.zeros(1, dtype=torch.int64, device=CUDA),
                    max_seq_len=end,
                    query_lens_host=(new,),
                    seq_lens_host=(end,),
                )
            )
            mine = qkv[begin:end].clone()
            turned = angles[0][begin:end].contiguous(), angles[1][begin:end].contiguous()
            attention.store(0, mine, turned, None, None, 0.0)
            key, value = mine[:, heads:].chunk(2, dim=1)
            parts.append(attention.forward(0, mine[:, :heads], key, value))
        outs.append(torch.cat(parts))
    close(outs[0], outs[1])
    close(outs[0], outs[2])
