"""First tokens of long prompts that take turns beyond the pool, with and without host memory for cached prefixes.

    python -m tests.bench.host_tier [--sessions 10] [--tokens 32768] [--pool-sessions 3] [--host-gib 44] [--rounds 2]
        [--suffixes 128 600 2048] [--runs 1 3 40 400 2048] [--json FILE]

One prefill node's worker, page bookkeeping and host memory, without sockets: prompts come one at a time, each session
once per round, and each round adds a few tokens to every session. Times are host time from the arrival of a prompt to
its first token. Then, for some numbers of new tokens: a prefix that is in the pool (computation only), the copy of the
prefix with its checksums on its own, and a prefix that is copied from host memory while the prompt is computed. The
share of the copy that is hidden is 1 - (third - first) / second. Then the same copy to pages in some numbers of runs,
with one call of the CUDA runtime for each layer and with one for each run and plane: what the host takes to launch it,
and what passes until it has ended.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from unittest import mock

import numpy as np
import torch

from common.engine.forward.batch import CaptureHiddenMode
from common.engine.forward.model_runner import ModelRunner
from common.engine.forward.rotary_places import OneAxis
from common.engine.graphs import node_graphs
from common.engine.graphs.rules import PhaseSwitch
from common.engine.sampling.logit_adjustments import AdjustmentRows
from common.kv_cache.host_cache import HostCache
from common.kv_cache.host_layout import host_layout
from common.kv_cache.host_plan import INTACT, HostCopy
from common.kv_cache.page_space import PageSpace, as_keys
from common.kv_cache.pool_layout import PoolLayout
from common.kv_cache.radix_cache import Keys, RadixCache
from common.node.completion import completion_for
from common.node.host_bytes import HostBytes
from common.node.host_lane import host_lane
from common.node.host_share import ItemBytes
from common.node.host_store import HostStore, Lanes
from kv_transfer.send_order import SendOrder
from kv_transfer.transport.cuda.batch_copy import Addresses, BatchCopy
from kv_transfer.transport.cuda.pool_copies import MovedPool
from prefill_node.arriving_layers import ArrivingAttention, ArrivingLayers
from prefill_node.draft import NoDraft
from prefill_node.graphs import prompt_graphs
from prefill_node.host_parts import HostParts, host_prefixes
from prefill_node.host_tier import HostPrefixes
from prefill_node.planner import prompt_plan
from prefill_node.request import PrefillRequest
from prefill_node.scheduler import Chunk
from prefill_node.step import PrefillStep
from prefill_node.step_plan import PromptPlan
from prefill_node.step_result import Launched
from prefill_node.step_rules import PromptRules
from prefill_node.vision import TextEmbeds
from prefill_node.worker import DeviceWorker
from tests.bench import shapes
from tests.bench.engine import GREEDY, LOG, PAGE, constructed_runner
from tests.bench.environment import describe

PATIENCE = 60.0  # seconds for a copy or a comparison


class SingleCopies(MovedPool):
    """Copies each run of each plane by a call of its own."""

    def copy(self, targets: Addresses, sources: Addresses, sizes: Addresses) -> None:
        if not self.storage.is_cuda:
            super().copy(targets, sources, sizes)
            return
        with mock.patch.object(BatchCopy, "start", return_value=False):
            super().copy(targets, sources, sizes)


class Nobody:
    """The sending of a node without decode nodes."""

    def during(self, plan: PromptPlan) -> AbstractContextManager[None]:
        return nullcontext()

    def granted(self) -> None:
        """No-op: nobody grants."""

    def send(self, order: SendOrder) -> None:
        raise AssertionError("there is no decode node")


@dataclass(frozen=True, slots=True)
class Served:
    """One prompt: times in milliseconds."""

    first_token: float
    admitted: float  # of that: until its pages were free
    reused: int  # tokens that were not computed
    token: int  # the first one


class Node:
    """A prefill node without links, which serves one prompt at a time."""

    def __init__(self, runner: ModelRunner, chunk: int, graphs: str, arriving: ArrivingLayers) -> None:
        """`runner` attends through `arriving`."""
        wanted, device = PhaseSwitch(graphs), runner.pool.device
        captured = prompt_graphs.prefill_graphs(runner, wanted, chunk, 1, CaptureHiddenMode.NULL)
        node_graphs.capture(captured, LOG)
        self._arriving = arriving
        self._chunk = chunk
        self._pool = runner.pool
        self._completion = completion_for(device, one_behind=False)
        vocab_size = runner.model.config.vocab_size
        rows = AdjustmentRows.allocate(1, vocab_size, device)
        self._step = PrefillStep(
            captured.forward, TextEmbeds(), NoDraft(), rows, OneAxis(), PAGE, self._completion
        )
        self._generation = 0
        self.serve_with(0)

    @property
    def cache(self) -> HostCache:
        assert isinstance(self.host.tier, HostPrefixes)
        return self.host.tier.cache

    def store_with(self, copies: Callable[[PoolLayout, torch.Tensor], MovedPool]) -> HostStore:
        """Return another view of the node's host memory, which knows no checksums and copies by other means."""
        store, pool = self.host.copies, (self._pool.layout, self._pool.storage)
        assert isinstance(store, HostStore)
        layout = host_layout(self._pool.layout, self._given, PAGE)
        lanes = Lanes(host_lane(self._pool.device), host_lane(self._pool.device))
        return HostStore(layout, store.bytes, pool, self._arriving.expect, lanes, copies(*pool))

    def serve_with(self, host_bytes_given: int) -> None:
        """Begin with an empty pool and empty host memory of so many bytes; 0: none."""
        self.space = PageSpace(PAGE, self._pool.num_pages, RadixCache(PAGE))
        self.host, self._given = HostParts(), host_bytes_given
        if host_bytes_given:
            layout = host_layout(self._pool.layout, host_bytes_given, PAGE)
            memory = HostBytes(layout.planes.total_bytes, self._pool.device)
            lanes = Lanes(host_lane(self._pool.device), host_lane(self._pool.device))
            pool = self._pool.layout, self._pool.storage
            store = HostStore(layout, memory, pool, self._arriving.expect, lanes, MovedPool(*pool))
            items = ItemBytes.of(self._pool.layout)
            self.host = HostParts(host_prefixes(layout, items, store, self.space), store)
        self._worker = DeviceWorker(self._step, Nobody(), self._pool, self._completion, self.host.copies)
        self._leaving: list[PrefillRequest] = []

    def serve(self, keys: Keys, keep: bool = True) -> Served:
        """Serve a prompt. `keep`: its prefix is stored in host memory."""
        started = time.perf_counter()
        request = PrefillRequest(self._generation, "", keys, 0, GREEDY, "", 0.0)
        until = started + PATIENCE
        while request.lease is None:
            request.lease = self.space.lease(keys, self.space.pages_for(len(keys)), len(keys) - 1)
            if request.lease is None:
                self._turn(until)
        request.scheduled = request.computed = request.lease.cached_tokens
        self.host.tier.plan_load(request, keys)
        admitted, reused = time.perf_counter(), request.reused
        for launched in self._chunks(request):
            launched.completion.wait()
            result = launched.read()
            assert result.damage == INTACT, "bytes in host memory have changed"
            drawn = result.drawn
        done = time.perf_counter()
        self.host.tier.loaded(request)
        request.lease.commit(keys)
        if keep:
            self.host.tier.store(request, keys)
        self._leaving.append(request)
        self._release()
        token = drawn[0].token
        assert token is not None
        return Served(1e3 * (done - started), 1e3 * (admitted - started), reused, token.id)

    def settle(self) -> float:
        """Wait until everything is stored; return the milliseconds that it took."""
        started = time.perf_counter()
        while self._leaving or self.host.tier.busy:
            self._turn(started + PATIENCE)
        return 1e3 * (time.perf_counter() - started)

    def _chunks(self, request: PrefillRequest) -> Iterator[Launched]:
        """Launch one chunk before the one before it is read."""
        before: Launched | None = None
        while request.remaining:
            length = min(self._chunk, request.remaining)
            launched = self._launch([Chunk(request, request.scheduled, length)])
            request.load, request.scheduled = None, request.scheduled + length
            if before is not None:
                yield before
            before = launched
        assert before is not None
        yield before

    def _launch(self, chunks: Sequence[Chunk]) -> Launched:
        self._generation += 1
        stores = tuple(self.host.tier.planned())
        return self._worker.apply(prompt_plan(chunks, PAGE, PromptRules(), self._generation, (), stores))

    def _turn(self, until: float) -> None:
        """Go on with what is under way, as an idle turn of a node does."""
        assert time.perf_counter() < until, "a copy or a comparison does not end"
        self._launch([])
        self._release()
        time.sleep(0.0002)

    def _release(self) -> None:
        self.host.tier.settle()
        for request in [each for each in self._leaving if not each.storing]:
            assert request.lease is not None
            request.lease.release()
            self._leaving.remove(request)


def texts(sessions: int, tokens: int, vocab_size: int, seed: int = 1) -> list[Keys]:
    rng = np.random.default_rng(seed)
    return [as_keys(rng.integers(20, vocab_size, tokens).astype(np.int64)) for _ in range(sessions)]


def longer(text: Keys, tokens: int, vocab_size: int) -> Keys:
    """Return the text with new tokens at its end."""
    return np.concatenate((text, *texts(1, tokens, vocab_size, len(text) + tokens)))


@dataclass(frozen=True, slots=True)
class Overlap:
    """Medians in milliseconds for a number of new tokens."""

    new: int
    computed: float  # the prefix is in the pool
    copied: float  # the copy of the prefix and its checksums on their own
    both: float  # first token with both
    hidden: float  # share of the copy
    equal: int  # of three first tokens: the same with the prefix in the pool and in host memory


def measure_overlap(node: Node, text: Keys, new: int, vocab: int) -> Overlap:
    """Measure a prompt of `text`, which is in host memory, and so many new tokens."""
    both, computed, equal = list[float](), list[float](), 0
    for repeat in range(3):
        asked = longer(text, new + repeat, vocab)
        node.space.flush()
        loaded = node.serve(asked, keep=False)
        assert loaded.reused > 0.8 * len(text), "the prefix is not in host memory"
        node.space.flush()
        node.serve(text, keep=False)
        cached = node.serve(asked, keep=False)
        both.append(loaded.first_token)
        computed.append(cached.first_token)
        equal += loaded.token == cached.token
    copied = copy_ms(node, text)
    first, second = statistics.median(computed), statistics.median(both)
    return Overlap(new, first, copied, second, 1 - (second - first) / copied, equal)


def copy_ms(node: Node, text: Keys) -> float:
    """Return the milliseconds of a copy of a prefix to free pages, with nothing beside it."""
    store, tier = node.host.copies, node.host.tier
    assert isinstance(store, HostStore)
    for each in range(3):
        request = PrefillRequest(each, "", text, 0, GREEDY, "", 0.0)
        node.space.flush()
        request.lease = node.space.lease(text, node.space.pages_for(len(text)), 0)
        assert request.lease is not None
        tier.plan_load(request, text)
        assert request.load is not None
        _synchronize()
        started = time.perf_counter()
        store.load([request.load])
        _synchronize()
        took = 1e3 * (time.perf_counter() - started)
        tier.loaded(request)
        request.lease.release()
    return took


@dataclass(frozen=True, slots=True)
class ScatteredLoad:
    """Medians in milliseconds of a load to pages in so many runs."""

    runs: int
    batched: bool
    launched: float  # until the host can go on
    copied: float  # until the checksums are on the host


def measure_runs(node: Node, text: Keys, runs: int, batched: bool) -> ScatteredLoad:
    """Load a prefix, which is in host memory, to pages in some order. The pool's content is lost."""
    cache = node.cache
    prefix = cache.find(text, len(text), b"")
    assert prefix is not None, "the prefix is not in host memory"
    size = cache.block_tokens // PAGE
    host = [page for block in prefix.blocks for page in range(block * size, (block + 1) * size)]
    node.space.flush()
    parts = np.array_split(np.arange(1, len(host) + 1), min(runs, len(host)))
    order = np.random.default_rng(runs).permutation(len(parts))
    pages = np.concatenate([parts[each] for each in order]).tolist()
    store = node.store_with(MovedPool if batched else SingleCopies)
    launched, copied = list[float](), list[float]()
    for _ in range(5):
        _synchronize()
        started = time.perf_counter()
        store.load([HostCopy(pages=tuple(pages), host_pages=tuple(host))])
        launched.append(1e3 * (time.perf_counter() - started))
        _synchronize()
        copied.append(1e3 * (time.perf_counter() - started))
    cache.release(prefix)
    return ScatteredLoad(len(parts), batched, statistics.median(launched), statistics.median(copied))


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shape", default=shapes.LLAMA)
    parser.add_argument("--sessions", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=32768, help="of a session at first")
    parser.add_argument("--pool-sessions", type=int, default=3, help="that fit into the pool")
    parser.add_argument("--host-gib", type=float, default=44.0)
    parser.add_argument("--rounds", type=int, default=2, help="after the first one, with host memory")
    parser.add_argument("--chunk", type=int, default=2048)
    parser.add_argument("--suffixes", type=int, nargs="*", default=[128, 600, 2048])
    parser.add_argument(
        "--runs", type=int, nargs="*", default=[1, 3, 40, 400, 2048], help="of pages of a load"
    )
    parser.add_argument("--graphs", default="breakable", choices=["breakable", "piecewise", "none"])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device = torch.device(options.device)
    room = options.tokens + max([64 * (options.rounds + 1), *(each + 64 for each in options.suffixes)])
    began = time.perf_counter()
    pool_tokens = options.pool_sessions * -(-room // PAGE) * PAGE
    config = shapes.config_of(options.shape)
    config["max_position_embeddings"] = max(config["max_position_embeddings"], room)
    plain = constructed_runner(config, pool_tokens, device, options.chunk)
    arriving = ArrivingLayers()
    unbroken = prompt_graphs.unbroken_tokens(plain.model.placement, PhaseSwitch(options.graphs))
    attention = ArrivingAttention(plain.attention, arriving, unbroken)
    node = Node(ModelRunner(plain.model, plain.pool, attention), options.chunk, options.graphs, arriving)
    vocab = plain.model.config.vocab_size
    # Compiles what no graph has run.
    node.serve(texts(1, min(options.tokens, 4 * options.chunk), vocab, 99)[0])
    print(f"made in {time.perf_counter() - began:.1f} s", flush=True)
    sessions = texts(options.sessions, options.tokens, vocab)
    rows: list[dict[str, object]] = []
    for host in (0, int(options.host_gib * (1 << 30))):
        began = time.perf_counter()
        node.serve_with(host)
        print(f"host memory of {host >> 20} MiB ready in {time.perf_counter() - began:.1f} s", flush=True)
        for turn in range(1 + (options.rounds if host else 1)):
            served = [node.serve(longer(text, 32 * turn, vocab) if turn else text) for text in sessions]
            left = node.settle()
            times = sorted(each.first_token for each in served)
            row = {
                "host_mib": host >> 20,
                "round": turn,
                "first_token_ms": [round(each, 1) for each in times],
                "median_ms": round(statistics.median(times), 1),
                "admitted_ms": round(statistics.median(each.admitted for each in served), 1),
                "reused": [each.reused for each in served],
                "left_ms": round(left, 1),
            }
            rows.append(row)
            shown = {**row, "reused": sum(each.reused for each in served)}
            print(json.dumps(shown), flush=True)
    totals = asdict(node.host.tier.totals())
    print(json.dumps(totals), flush=True)
    scattered = []
    for runs in options.runs:
        for batched in (True, False):
            scattered.append(measure_runs(node, sessions[0], runs, batched))
            print(json.dumps(asdict(scattered[-1])), flush=True)
    overlaps = []
    for new in options.suffixes:
        overlaps.append(measure_overlap(node, sessions[0], new, vocab))
        print(json.dumps(asdict(overlaps[-1])), flush=True)
    if options.json:
        report = {
            "environment": describe(),
            "options": vars(options),
            "rows": rows,
            "totals": totals,
            "scattered": [asdict(each) for each in scattered],
            "overlap": [asdict(each) for each in overlaps],
        }
        options.json.write_text(json.dumps(report, indent=2, default=str) + "\n")


if __name__ == "__main__":
    main()
