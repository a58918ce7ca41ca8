"""Kernels that compile while serving are reported: users would only see a slow first token."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from common.engine.attention.paged import PagedAttention
from common.engine.attention.prompt_attention import PromptAttention
from common.engine.forward.batch import ForwardBatch, ForwardMode
from common.engine.graphs.node_graphs import NodeGraphs
from common.engine.graphs.rules import PhaseSwitch
from common.engine.ops.fp8_codes import FP8
from common.engine.ops.linear import linear
from common.engine.ops.rms_norm import rms_norm
from common.engine.ops.tiles import each_division
from common.engine.ops.triton_kernel import report_compilations
from common.engine.sampling.logit_adjustments import AdjustmentRows, Adjustments
from common.engine.sampling.logit_masks import LogitMasks
from common.engine.sampling.sampling_plan import AdjustmentFacts
from common.engine.state.relay_state import RelayState
from common.node import graph_start
from common.observability.logs import Log
from decode_node.graphs import step_graphs
from decode_node.graphs.decode_graph import DecodeGraphs
from decode_node.page_table import PageTable
from tests.fakes.pools import plain_pool
from tests.unit.engine.graphs.rig import DeviceDriver, model, sequences

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture
def compiled() -> Iterator[list[str]]:
    """Yield the kernels that compile from here on."""
    import triton

    told: list[str] = []
    report_compilations(lambda kernel, seconds: told.append(kernel))
    yield told
    triton.knobs.runtime.jit_cache_hook = triton.knobs.runtime.jit_post_compile_hook = None


@pytest.mark.parametrize(
    ("kind", "stored", "page_size"),
    [
        (PromptAttention, torch.bfloat16, 16),
        (PromptAttention, FP8, 16),
        (PromptAttention, FP8, 8),
        (PagedAttention, torch.bfloat16, 32),
    ],
)
def test_no_prompt_batch_compiles_after_the_warm_up(
    kind: type[PagedAttention], stored: torch.dtype, page_size: int, compiled: list[str]
) -> None:
    """The first load after start-up waited 1.3 and 1.8 s for two tiles of extend attention. So could a draft."""
    heads, kv_heads, dim = 24, 6, 128  # used by no other test: nothing is compiled yet
    pool = plain_pool(2, kv_heads, dim, page_size, 3, stored, torch.device("cuda"))
    attention = kind(pool, [None, 64])
    attention.warm_up(heads, torch.bfloat16, 8192, 200)
    assert any("extend_kernel" in kernel for kernel in compiled)
    compiled.clear()
    for tokens, requests in (
        (1, 1),
        (7, 3),
        (130, 2),
        (512, 1),
        (1025, 64),
        (600, 1),
        (1100, 1),
        (5000, 1),
        (2048, 9),
        (8192, 16),
        (999, 200),
    ):
        starts = torch.zeros(requests + 1, dtype=torch.int32, device="cuda")
        starts[1:] = tokens
        zeros = torch.zeros(requests, dtype=torch.int32, device="cuda")
        ids = torch.zeros(tokens, dtype=torch.int64, device="cuda")
        attention.plan(
            ForwardBatch(
                mode=ForwardMode.EXTEND,
                input_ids=ids,
                positions=ids,
                kv_slots=ids,
                page_table=torch.zeros(requests, 1025, dtype=torch.int32, device="cuda"),
                seq_lens=zeros,
                query_start=starts,
                logits_rows=ids[:0],
                max_seq_len=0,
                query_lens_host=(tokens,) + (0,) * (requests - 1),
                seq_lens_host=(tokens,) + (0,) * (requests - 1),
            )
        )
        qkv = torch.randn(tokens, heads + 2 * kv_heads, dim, device="cuda").to(torch.bfloat16)
        query, key, value = qkv.split((heads, kv_heads, kv_heads), dim=1)
        for layer in (0, 1):
            attention.forward(layer, query, key, value)
    assert not compiled


def test_no_number_of_prompts_compiles_an_lm_head(compiled: list[str]) -> None:
    """The first forward that ended more than 16 prompts compiled one of four."""
    weight = torch.randn(16 * 1031, 416, device="cuda").to(torch.bfloat16)  # used by no other test
    hidden = torch.randn(200, 416, device="cuda").to(torch.bfloat16)
    for rows in each_division(200):
        linear(hidden[:rows], weight, None)
    assert sum("_linear_kernel" in kernel for kernel in compiled) > 2
    compiled.clear()
    for rows in range(1, 201):
        linear(hidden[:rows], weight, None)
    assert not compiled


def test_no_penalty_or_mask_compiles_after_start_up(compiled: list[str]) -> None:
    """One kernel each serves batches and draft trees of any size; it is compiled when the node allocates."""
    vocab = 4112
    state = AdjustmentRows.allocate(70, vocab, torch.device("cuda"))
    compiled.clear()
    facts = AdjustmentFacts(penalties=True, biases=5, withheld=2)
    for rows, width in ((1, 0), (16, 0), (1, 1), (3, 7), (64, 16), (70, 31)):
        owner = torch.arange(1, rows + 1, device="cuda")
        path = torch.full((rows, width), -1, dtype=torch.int64, device="cuda")
        Adjustments(state, owner, facts, path).apply(torch.zeros(rows, vocab, device="cuda"), owner)
        words = torch.zeros(rows, -(-vocab // 32), dtype=torch.int32, device="cuda")
        LogitMasks(words, owner - 1).apply(torch.zeros(rows, vocab, device="cuda"))
    assert not compiled


def test_each_new_specialization_is_reported_once(compiled: list[str]) -> None:
    for width in (208, 208, 13):
        rms_norm(torch.randn(2, width, device="cuda"), torch.randn(width, device="cuda"), 1e-5)
    assert [kernel.partition("[")[0] for kernel in compiled] == ["_rms_norm_kernel"] * 2


def test_what_decode_graphs_launch_is_compiled_ahead(compiled: list[str]) -> None:
    """A node with an empty cache compiled one kernel after another, for half a minute."""
    driver = DeviceDriver(model(device=torch.device("cuda")), sequences([9]), 4)
    vocab = driver.runner.model.config.vocab_size
    relay = RelayState.allocate(9, vocab, driver.pool.device)
    table = PageTable(9, 16, driver.pool.device)

    def build() -> list[NodeGraphs[DecodeGraphs]]:
        return [step_graphs.decode_graphs(driver.runner, relay, table, PhaseSwitch("full"), 8, 64)]

    graph_start.compiled(driver.pool.device, build, Log("test"))
    assert compiled
    compiled.clear()
    (made,) = build()
    made.forward.graphs.capture()
    assert not [row.error for row in made.forward.graphs.rows if row.error]
    # Smaller shapes are tried with one way of sampling.
    assert len(compiled) <= 1, compiled
