"""Which batches are one whole prompt, so that they can be computed without pages."""

from __future__ import annotations

import pytest
import torch

from common.engine.attention.prompt_attention import PromptAttention
from common.engine.attention.whole_prompt import MIN_TOKENS, whole_prompt_rows
from common.engine.forward.batch import ForwardBatch, ForwardMode
from tests.fakes.pools import plain_pool


def batch(
    new: tuple[int, ...], total: tuple[int, ...], mode: ForwardMode = ForwardMode.EXTEND
) -> ForwardBatch:
    none = torch.zeros(0, dtype=torch.int64)
    return ForwardBatch(
        mode, none, none, none, none[None], none, none, none, 0, query_lens_host=new, seq_lens_host=total
    )


@pytest.mark.parametrize(
    ("new", "total", "rows", "live"),
    [
        ((2048,), (2048,), 2048, 2048),
        ((1900,), (1900,), 2048, 1900),
        ((1500,), (1500,), 2048, None),  # too much padding
        ((2048,), (2049,), 2048, None),  # a cached prefix
        ((1024, 1024), (1024, 1024), 2048, None),
        ((MIN_TOKENS - 1,), (MIN_TOKENS - 1,), MIN_TOKENS - 1, None),
    ],
)
def test_whole_prompt_rows(new: tuple[int, ...], total: tuple[int, ...], rows: int, live: int | None) -> None:
    assert whole_prompt_rows(batch(new, total), rows) == live


def test_other_modes_are_not_prompts() -> None:
    assert whole_prompt_rows(batch((2048,), (2048,), ForwardMode.DECODE), 2048) is None


def test_the_cpu_path_never_takes_it() -> None:
    """The CPU path reads pages in any case, so the numbers of a request do not depend on the announcement."""
    pool = plain_pool(1, 1, 16, 16, 80, torch.float32, "cpu")
    attention = PromptAttention(pool, [None], whole_prompt_tokens=(1024,))
    query = torch.randn(1024, 1, 16)
    plan = batch((1024,), (1024,))
    plan.input_ids = torch.zeros(1024, dtype=torch.int64)
    plan.page_table = torch.arange(1, 65, dtype=torch.int32)[None]
    plan.seq_lens, plan.query_start = torch.tensor([1024]), torch.tensor([0, 1024])
    attention.plan(plan)
    assert not attention.forward(0, query, query, query).any()  # the pages hold zeros
