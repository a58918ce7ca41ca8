"""Measures sums over the ranks of a node, with the residual addition and RMSNorm that follow, on one GPU per rank.

    python -m tests.bench.all_reduce --ranks 2 --json all_reduce.json

Prints microseconds per call, from graphs of many calls that all ranks replay at once, by the bytes of the sum:

    norm      residual addition and RMSNorm of one rank
    fused     the sum over peer memory with the norm: one-shot up to 64 rows, streamed beyond
    apart     that sum, then the norm
    streamed  the streamed form for any number of rows, with the norm
    nccl      NCCL, then the norm
    codes     as fused, and the results are quantised to FP8
    codes_2   as apart, and the norm quantises to FP8
    added     fused less norm: the time that a sum adds to a step

With one rank the kernel waits for nobody: the time of its own work. Ranks have to be on GPUs of their own.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from common.engine.collectives.endpoints import GroupEndpoint, open_endpoints
from common.engine.collectives.group import CollectiveGroup
from common.engine.collectives.peer_memory_group import PeerMemoryGroup
from common.engine.collectives.process_group import ProcessGroupCollectives, nccl
from common.engine.collectives.shared_memory_group import SharedMemoryGroup
from common.engine.ops.fp8_rms_norm import fp8_add_rms_norm
from common.engine.ops.peer_norm import SumNorm
from common.engine.ops.peer_rows import stream_sum
from common.engine.ops.rms_norm import add_rms_norm
from kv_transfer.transport.cuda.cudart import CudaRuntime
from tests.bench.bench_ranks import start_ranks
from tests.bench.timing import wake

HIDDEN = 8192
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 8192)  # 16 KiB each
CALLS, REPLAYS = 50, 15
SECONDS = 60.0
END_SECONDS = 300.0

Call = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def measure(call: Call, rows: int, host: CollectiveGroup) -> float:
    """Return the microseconds of one of CALLS calls, each of which reads what the one before has written."""
    x, residual = torch.randn(2, rows, HIDDEN, device="cuda").to(torch.bfloat16)
    call(x, residual)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        found = x, residual
        for _ in range(CALLS):
            found = call(*found)
    times = []
    for _ in range(REPLAYS):
        host.all_reduce(torch.zeros(1))  # all ranks begin together
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    return 1000 * statistics.median(times[2:]) / CALLS


def calls(peers: PeerMemoryGroup, large: CollectiveGroup) -> dict[str, Call]:
    weight = torch.ones(HIDDEN, dtype=torch.bfloat16, device="cuda")

    def norm(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        return add_rms_norm(x, residual, weight, 1e-5)

    def streamed(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        out, norm = torch.empty_like(x), SumNorm.of(x, residual, weight, 1e-5)
        stream_sum(x, out, peers.memory, norm)
        return out, norm.total

    def codes(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        return x, peers.all_reduce_fp8_norm(x, residual, weight, 1e-5, False)[2]

    def codes_apart(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        return x, fp8_add_rms_norm(peers.all_reduce(x), residual, weight, 1e-5, False)[2]

    return {
        "norm": norm,
        "fused": lambda x, residual: peers.all_reduce_norm(x, residual, weight, 1e-5),
        "apart": lambda x, residual: norm(peers.all_reduce(x), residual),
        "streamed": streamed,
        "nccl": lambda x, residual: norm(large.all_reduce(x), residual),
        "codes": codes,
        "codes_2": codes_apart,
    }


@torch.inference_mode()
def run_rank(endpoint: GroupEndpoint) -> list[dict[str, float]]:
    """Measure with the other ranks, which do the same, and return a row per size."""
    device = torch.device("cuda", endpoint.rank)
    torch.cuda.set_device(device)
    host = SharedMemoryGroup(endpoint, SECONDS)
    peers = PeerMemoryGroup.connect(host, CudaRuntime(), device, SECONDS)
    large = ProcessGroupCollectives(host, nccl(SECONDS, device))
    found = []
    wake()
    for rows in ROWS:
        row: dict[str, float] = {"bytes": rows * HIDDEN * 2}
        for name, call in calls(peers, large).items():
            row[name] = round(measure(call, rows, host), 2)
            peers.check()
        row["added"] = round(row["fused"] - row["norm"], 2)
        found.append(row)
    host.all_reduce(torch.zeros(1))
    large.close()
    host.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2, help="1 to 8, on cuda:0 and up")
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("--rank", help="endpoint of a rank that this program has started")
    args = parser.parse_args()
    if args.rank:
        run_rank(msgspec.json.decode(args.rank, type=GroupEndpoint))
        return
    own, *others = open_endpoints(args.ranks)
    processes = start_ranks("tests.bench.all_reduce", others)
    try:
        found = run_rank(own)
        for process in processes:
            assert process.wait(END_SECONDS) == 0, "a rank has failed"
    finally:
        for process in processes:
            process.kill()
            process.wait()
    print(" ".join(f"{name:>8}" for name in found[0]))
    for row in found:
        print(" ".join(f"{value:8g}" for value in row.values()))
    if args.json:
        args.json.write_text(json.dumps({"ranks": args.ranks, "hidden": HIDDEN, "rows": found}, indent=1))


if __name__ == "__main__":
    main()
