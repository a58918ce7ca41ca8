"""On a GPU the host sees marks while the rest of a graph runs, and requests join without waiting for it."""

from __future__ import annotations

import pytest
import torch
from msgspec.structs import replace

from common.engine.ops.write_mark import write_mark
from common.engine.state.draft_row import DraftRow, DraftShape
from common.engine.state.relay_state import RelayState
from common.engine.state.state_rows import WindowShape
from common.messages.generation import SamplingParams
from decode_node.page_table import PageTable
from tests.fakes.waiting import until
from tests.fakes.waiting_for_device import waits_are_errors

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
BUSY = 1_000_000_000  # cycles, half a second


def test_a_mark_is_seen_while_the_graph_runs() -> None:
    device = torch.device("cuda", 0)
    count = torch.zeros(1, dtype=torch.int64, device=device)
    seen = torch.zeros(1, dtype=torch.int64, pin_memory=True)
    write_mark(count, seen)  # compiles the kernel
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        write_mark(count, seen)
        torch.cuda._sleep(BUSY)
        write_mark(count, seen)
    for before in (1, 3):
        graph.replay()
        end = torch.cuda.Event()
        end.record()
        until(lambda: int(seen[0]) > before)  # noqa: B023
        assert int(seen[0]) == before + 1
        assert not end.query(), "the mark was seen only after the graph had ended"
        end.synchronize()
        assert int(seen[0]) == before + 2


def test_requests_join_without_waiting() -> None:
    device, shape = torch.device("cuda", 0), DraftShape(2, 8, "bfloat16", 64)
    relay = RelayState.allocate(3, 64, device, shape, WindowShape({0: 4}, 2, torch.bfloat16))
    table = PageTable(3, 40, device)
    plain = SamplingParams(max_tokens=9, temperature=0.5, top_p=0.75, top_k=11, min_p=0.125, seed=77)
    penalised = replace(plain, presence_penalty=0.5, repetition_penalty=1.5, logit_bias=((3, 0.5),))
    draft = DraftRow((0.5, 0.25), (7, 8), bytes(16))
    with waits_are_errors():
        for sampling in (plain, penalised, plain):
            relay.write_row(1, [3, 4, 5, 6], 1, sampling, draft, slot=1)
            table.write([(1, logical, logical + 3) for logical in range(40)])
    assert relay.last_token.tolist() == [0, 6, 0, 0]
    assert relay.draft.draft_topk_ids[1].tolist() == [7, 8]
