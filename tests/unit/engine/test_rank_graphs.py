"""Graphs of models that are divided among ranks: captured and replayed on every rank, as eager forwards of one rank."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import msgspec
import pytest
import torch
from torch import Tensor

from common.checkpoint.model_config import ModelConfig
from common.engine.collectives.group import CollectiveGroup
from common.engine.collectives.group_ranks import GroupRanks
from common.engine.collectives.process_group import ProcessGroupCollectives
from common.engine.collectives.shared_memory_group import SharedMemoryGroup
from common.engine.forward.batch import CaptureHiddenMode
from common.engine.graphs import node_graphs
from common.engine.graphs.backends.base import Backend, CaptureError
from common.engine.graphs.backends.none import NoGraphs
from common.engine.graphs.backends.tape import TapeRecorder
from common.engine.graphs.ladders import prefill_token_buckets
from common.engine.graphs.rules import PhaseSwitch
from common.engine.graphs.spec import GraphKey
from common.engine.layers.ranks import ONE_RANK, Ranks
from common.engine.ops.best_tokens import FIELDS
from common.messages.generation import SamplingParams
from common.observability.logs import Log
from prefill_node.graphs.backends.compiled_body import CompiledBodies
from prefill_node.graphs.prefill_extend import PrefillExtend, extend_spec
from prefill_node.graphs.prompt_graphs import prefill_graphs
from tests.fakes.memory_checkpoint import drawn_checkpoint, filled_model
from tests.fakes.peer_rank import gloo
from tests.fakes.thread_ranks import run_ranks
from tests.fakes.tiny_model import CONFIG, MIXTURE
from tests.fakes.waiting import PATIENCE
from tests.unit.engine.graphs.rig import BACKENDS, DecodeRig, piecewise, sequences
from tests.unit.engine.paged_driver import Driver
from tests.unit.engine.test_rank_options import HYBRID

IDS = sequences((60, 41, 23))
BUCKETS = (8, 16, 32)
# (sequences, new tokens of each) for every bucket, growing and shrinking
STEPS = [([0], [4]), ([0, 1], [20, 9]), ([2], [6]), ([1], [15]), ([0, 2], [16, 15])]
PROMPTS: Mapping[str, Callable[[], Backend]] = {
    "breakable": BACKENDS["breakable"],
    "piecewise": lambda: piecewise(CompiledBodies()),
}
PARAMS = [
    SamplingParams(max_tokens=99, temperature=0.0, seed=1),
    SamplingParams(max_tokens=99, temperature=0.8, seed=2),
    SamplingParams(max_tokens=99, temperature=1.1, top_p=0.8, top_k=12, seed=3),
]
ROWS = [[0], [0, 1], [0, 1, 2], [2, 0], [1]]


@torch.inference_mode()
def prompt_logits(config: ModelConfig, tensors: Mapping[str, Tensor], ranks: Ranks, backend: str) -> Tensor:
    driver = Driver(filled_model(config, tensors, ranks), IDS, 4)
    if backend:
        extend = PrefillExtend(
            driver.runner, extend_spec(BUCKETS, CaptureHiddenMode.NULL), PROMPTS[backend]()
        )
        extend.graphs.capture()
        assert not [row.error for row in extend.graphs.rows if row.error]
        driver.runner = extend  # type: ignore[assignment]  # has the same call signature
    found = torch.cat([driver.run(rows, lengths).logits for rows, lengths in STEPS])
    if backend:
        assert extend.graphs.counters.replays.total() == len(STEPS)
    return found


@pytest.mark.parametrize("backend", PROMPTS)
@pytest.mark.parametrize("config", [CONFIG, MIXTURE, HYBRID], ids=["dense", "experts", "gated delta"])
def test_prompt_graphs_of_several_ranks(config: ModelConfig, backend: str) -> None:
    tensors = drawn_checkpoint(config)
    expected = prompt_logits(config, tensors, ONE_RANK, "")
    first, second = run_ranks(2, lambda ranks: prompt_logits(config, tensors, ranks, backend))
    torch.testing.assert_close(first, expected, atol=1e-4, rtol=1e-5)
    assert torch.equal(first, second)


@torch.inference_mode()
def decoded(
    config: ModelConfig, tensors: Mapping[str, Tensor], ranks: Ranks, backend: Backend
) -> list[Tensor]:
    """Return the tokens of every step and the relay rows after the last one."""
    buckets = () if backend.name == "none" else (1, 2, 4)
    rig = DecodeRig(IDS, PARAMS, backend, buckets, target=filled_model(config, tensors, ranks))
    tokens = [rig.step(rows).token_ids.clone() for rows in ROWS]
    assert rig.graphs.graphs.counters.replays.total() == (len(ROWS) if buckets else 0)
    return [*tokens, rig.relay.seq_len, rig.relay.last_token]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("config", [CONFIG, MIXTURE], ids=["dense", "experts"])
def test_decode_graphs_of_several_ranks_draw_the_same_tokens(config: ModelConfig, size: int) -> None:
    """Greedy, seeded and filtered draws."""
    tensors = drawn_checkpoint(config)
    expected = decoded(config, tensors, ONE_RANK, NoGraphs())
    for found in run_ranks(size, lambda ranks: decoded(config, tensors, ranks, BACKENDS["tape"]())):
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_ranks_exchange_whole_logits_only_where_a_draw_takes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy and random draws exchange a candidate of each rank; filters, log-probabilities and biases need all."""
    widths: list[int] = []
    gather = SharedMemoryGroup.all_gather

    def counted(group: SharedMemoryGroup, x: Tensor, columns: int) -> Tensor:
        if group.shard.rank == 0:
            widths.append(columns)
        return gather(group, x, columns)

    monkeypatch.setattr(SharedMemoryGroup, "all_gather", counted)
    tensors = drawn_checkpoint(CONFIG)
    greedy, random = PARAMS[:2]
    cases = [
        ([greedy] * 3, 2 * FIELDS),
        ([greedy, random, random], 2 * FIELDS),
        (PARAMS, CONFIG.vocab_size),
        ([msgspec.structs.replace(greedy, logprobs=2)] * 3, CONFIG.vocab_size),
        ([msgspec.structs.replace(random, logit_bias=((5, 1.0),))] * 3, CONFIG.vocab_size),
    ]

    @torch.inference_mode()
    def run(ranks: Ranks, params: Sequence[SamplingParams]) -> Tensor:
        rig = DecodeRig(IDS, params, BACKENDS["tape"](), (4,), target=filled_model(CONFIG, tensors, ranks))
        widths.clear()
        return rig.step([0, 1, 2]).token_ids.clone()

    for params, width in cases:
        expected = run(ONE_RANK, params)
        first, second = run_ranks(2, lambda ranks, params=params: run(ranks, params))  # type: ignore[misc]
        assert torch.equal(first, expected)
        assert torch.equal(second, expected)
        assert widths == [width]


# How ranks in threads are joined: as those of a CPU, or as those of GPUs, whose warm-ups and captures differ.
GROUPS: Mapping[str, Callable[[CollectiveGroup], CollectiveGroup]] = {
    "host": lambda host: host,
    "device": lambda host: ProcessGroupCollectives(host, gloo),
}


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize(("station", "calls"), [("session", 1), ("begin", 2)])
def test_a_graph_that_one_rank_cannot_capture_is_dropped_on_all(
    station: str, calls: int, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No rank waits for one that has failed before its warm-up or after it; all run these shapes without a graph.

    A graph is one session of two segments.
    """
    step, here = getattr(TapeRecorder, station), threading.local()

    def failing(recorder: TapeRecorder) -> object:
        here.begun = getattr(here, "begun", -1) + 1
        # both attempts at the largest graph of rank 0, and at the next one of rank 1
        if here.begun in (calls * here.rank, calls * here.rank + 1):
            raise CaptureError("no room")
        return step(recorder)

    monkeypatch.setattr(TapeRecorder, station, failing)
    monkeypatch.setattr(TapeRecorder, "warm_ups", 2)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    tensors, exchanged = drawn_checkpoint(CONFIG), Exchange(2)

    @torch.inference_mode()
    def run(host: GroupRanks) -> tuple[list[GraphKey], Tensor]:
        ranks = GroupRanks(GROUPS[group](host.group))
        here.rank = ranks.shard.rank
        driver = Driver(filled_model(CONFIG, tensors, ranks), IDS, 4)
        graphs = prefill_graphs(
            driver.runner, PhaseSwitch("breakable"), max(BUCKETS), 4, CaptureHiddenMode.NULL
        )
        node_graphs.capture(graphs, Log("test"), partial(exchanged.common, here.rank))
        driver.runner = graphs.forward  # type: ignore[assignment]  # has the same call signature
        found = torch.cat([driver.run(rows, lengths).logits for rows, lengths in STEPS])
        ranks.group.check()
        host.group.all_reduce(torch.zeros(1))  # all have ended their calls
        return graphs.forward.graphs.captured, found

    (captured, first), (others, second) = run_ranks(2, run)
    assert captured == others
    assert [key.shape.tokens for key in captured] == sorted(prefill_token_buckets(max(BUCKETS)))[-3::-1]
    assert torch.equal(first, second)
    expected = prompt_logits(CONFIG, tensors, ONE_RANK, "")
    torch.testing.assert_close(first, expected, atol=1e-4, rtol=1e-5)


class Exchange:
    """What ranks in threads have captured."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size, timeout=PATIENCE)
        self._given: dict[int, Sequence[GraphKey]] = {}

    def common(self, rank: int, own: Sequence[GraphKey]) -> Sequence[GraphKey]:
        self._given[rank] = own
        self._barrier.wait()
        return [key for key in own if all(key in each for each in self._given.values())]
