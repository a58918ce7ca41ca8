"""Speed of KV page transfers between a prefill and a decode process: shm, tcp, cuda_ipc, nixl.

    python -m tests.bench.transfer --json FILE [--transports cuda_ipc nixl shm tcp] [--tokens 64 512 8192]

Two real processes, with the page size and KV of the 8B shape (32 layers, 8 KV heads of 128, bf16: 128 KiB per token)
and random pages on both sides. Medians per transport and size:

  write    one write of all planes, from the call until its ticket is done; with GB/s and pages/s
  many     the same writes posted back to back
  call     cost of the call to the sending loop
  sums     cost of verifying the arrived pages to the receiving loop
  room     from send_pages to Arrived, including record, both state machines and a ZMQ frame each way

and for cuda_ipc and shm, for a forward with the 8B shape's products (on a CPU almost none) whose pages are sent layer
by layer, compared in one run with the same forward whose pages are sent after it:

  forward  from its launch to its end; "ratio" is layer over chunk: what the copies cost the products
  launch   cost of the launch to the sending loop
  behind   from the end of the forward to the last page's ticket

With `--shape` (see `shapes.py`) the planes are those of another model, for example qwen3.5-35b-a3b, and a room's time
is measured with its per-request planes and without:

  state    MiB of them, sent as a whole after the last page; "added" is what they add to "room"

With `--ranks 2x1` the first of two prefill ranks writes its heads to the only decode rank, and so on: one pair of
ranks, of which the larger number work at the same time. A room has no time then: it waits for all prefill ranks.

The floors are measured in the same run: for two GPUs one contiguous copy by the driver, for one GPU half of what a
contiguous device copy reads and writes, for the CPU a memcpy.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import re
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from common.kv_cache.plane import Kept
from common.kv_cache.pool_spec import PoolSpec, pool_spec
from kv_transfer.pair_plan import pair_plan
from kv_transfer.transport.base import Window
from tests.bench.environment import describe
from tests.bench.shapes import config_at, config_of
from tests.fakes.transfer_rig import Rig

PAGE = 16
LAYERS = [(8, 128)] * 32
LISTS = 9
STATES = 4  # state slots of each side


def shape_spec(shape: str) -> PoolSpec:
    """Return the planes of a model that keeps a state per request, without a draft."""
    spec = pool_spec(config_at(config_of(shape)), None, PAGE, "bfloat16")
    if not spec.state_bytes:
        raise SystemExit(f"{shape} keeps no state per request")
    return spec


def page_lists(rig: Rig, count: int, rng: random.Random) -> list[tuple[list[int], list[int]]]:
    return [
        (rng.sample(range(1, rig.src.num_pages), count), rng.sample(range(1, rig.dst.num_pages), count))
        for _ in range(LISTS)
    ]


def measure(rig: Rig, tokens: int, checksums: bool, rng: random.Random, whole: bool = True) -> dict[str, Any]:
    """Return one row. `whole`: this pair of ranks is all of both nodes, so rooms arrive."""
    pages = -(-tokens // PAGE)
    nbytes = pages * pair_plan(rig.src, rig.dst).page_bytes
    lists = page_lists(rig, pages, rng)
    rig.endpoint.announce(Window(0, rig.config["sender"], frozenset(range(rig.dst.num_pages)), 0))
    rig.ask("burst", lists=lists[:2], checksums=checksums)
    burst = rig.ask("burst", lists=lists, checksums=checksums)
    sums, side = [], pair_plan(rig.src, rig.dst).dst
    for _, dst in lists if checksums else ():
        began = time.perf_counter()
        rig.endpoint.page_digests(side, dst)
        sums.append(time.perf_counter() - began)
    rooms = [rig.send_room(src, dst) for src, dst in lists] if whole else []
    assert not any(room["lost"] for room in rooms)
    write = statistics.median(burst["single"])
    return {
        "tokens": tokens,
        "checksums": checksums,
        "mib": nbytes / (1 << 20),
        "write_us": 1e6 * write,
        "gb_s": nbytes / write / 1e9,
        "pages_s": pages / write,
        "many_gb_s": len(lists) * nbytes / burst["many"] / 1e9,
        "call_us": 1e6 * statistics.median(burst["host"]),
        "sums_us": 1e6 * statistics.median(sums) if sums else 0.0,
        "room_us": 1e6 * statistics.median(room["arrived"] - room["begun"] for room in rooms)
        if rooms
        else 0.0,
    }


def forwards(rig: Rig, name: str, tokens: int, checksums: bool, rng: random.Random) -> list[dict[str, Any]]:
    """Return medians in us, sent by chunk and then by layer; each runs once as a warm-up."""
    lists = page_lists(rig, -(-tokens // PAGE), rng)
    rows: list[dict[str, Any]] = []
    for by in ("chunk", "layer"):
        rig.ask("forward", by=by, tokens=tokens, lists=lists[:2])
        times = rig.ask("forward", by=by, tokens=tokens, lists=lists)
        medians = {f"{what}_us": 1e6 * statistics.median(each) for what, each in times.items()}
        rows.append({"transport": name, "tokens": tokens, "checksums": checksums, "by": by, **medians})
    for row in rows:
        row["ratio"] = row["forward_us"] / rows[0]["forward_us"]
    return rows


def run(
    name: str,
    devices: tuple[str, str],
    sizes: Sequence[int],
    checksums: bool,
    ranks: tuple[int, int] = (1, 1),
) -> list[dict[str, Any]]:
    """Return the rows of one transport; with `ranks` of both nodes those of their first ranks."""
    transport = name.partition(" ")[0]
    count = -(-max(sizes) // PAGE) + 8
    rig = Rig(
        transport,
        devices,
        layers=LAYERS,
        pages=(count, count),
        page_size=PAGE,
        checksums=checksums,
        ranks=((0, ranks[0]), (0, ranks[1])),
    )
    rng = random.Random(7)
    try:
        if ranks != (1, 1):
            return [{"transport": name, **measure(rig, tokens, checksums, rng, False)} for tokens in sizes]
        while not rig.send_room([1], [1])["arrived"]:
            pass
        found = [{"transport": name, **measure(rig, tokens, checksums, rng)} for tokens in sizes]
        if transport in ("cuda_ipc", "shm"):
            found += [row for tokens in sizes for row in forwards(rig, name, tokens, checksums, rng)]
        if transport == "cuda_ipc" and not checksums:
            for blocks in (16, 32, 64, 128, 264, 528, 1056, 4224):
                rig.ask("blocks", blocks=blocks)
                for tokens in (512, sizes[-1]):
                    row = measure(rig, tokens, checksums, rng)
                    found.append({"transport": f"{name}, {blocks} blocks", **row})
    finally:
        rig.close()
    return found


def run_state(
    name: str, devices: tuple[str, str], spec: PoolSpec, sizes: Sequence[int], checksums: bool
) -> list[dict[str, Any]]:
    """Return the medians of rooms with and without the per-request planes of `spec`, over the same pages."""
    transport, count = name.partition(" ")[0], -(-max(sizes) // PAGE) + 8
    paged = tuple(plane for plane in spec.planes if plane.kept is Kept.PAGED)
    rooms: list[list[float]] = []
    for planes in (PoolSpec(PAGE, paged), spec):
        slots = range(1, STATES + 1) if planes.state_bytes else [0]
        rig = Rig(
            transport,
            devices,
            pages=(count, count),
            page_size=PAGE,
            checksums=checksums,
            spec=planes,
            slots=STATES + 1,
        )
        rng = random.Random(7)
        try:
            while not rig.send_room([1], [1], slot=slots[0])["arrived"]:
                pass
            rooms.append([])
            for tokens in sizes:
                found = [
                    rig.send_room(src, dst, slot=slots[index % len(slots)])
                    for index, (src, dst) in enumerate(page_lists(rig, -(-tokens // PAGE), rng))
                ]
                assert not any(room["lost"] for room in found)
                rooms[-1].append(1e6 * statistics.median(room["arrived"] - room["begun"] for room in found))
        finally:
            rig.close()
    return [
        {
            "transport": name,
            "tokens": tokens,
            "checksums": checksums,
            "pages_mib": -(-tokens // PAGE) * spec.page_bytes / (1 << 20),
            "state_mib": spec.state_bytes / (1 << 20),
            "pages_us": without,
            "room_us": whole,
            "added_us": whole - without,
        }
        for tokens, without, whole in zip(sizes, *rooms, strict=True)
    ]


def floors(gpus: int) -> dict[str, float]:
    """Measure the GB/s in one direction of contiguous copies of 1 GiB (256 MiB on the CPU)."""
    found = {}
    host = torch.ones(1 << 28, dtype=torch.uint8)
    target = torch.empty_like(host)
    target.copy_(host)
    began = time.perf_counter()
    target.copy_(host)
    found["cpu memcpy"] = host.nbytes / (time.perf_counter() - began) / 1e9
    for other in range(min(gpus, 2)):
        a = torch.randint(255, (1 << 30,), dtype=torch.uint8, device="cuda:0")
        b = torch.empty(1 << 30, dtype=torch.uint8, device=f"cuda:{other}")
        seconds = []
        for _ in range(9):
            torch.cuda.synchronize("cuda:0")
            began = time.perf_counter()
            b.copy_(a, non_blocking=True)
            torch.cuda.synchronize("cuda:0")
            torch.cuda.synchronize(f"cuda:{other}")
            seconds.append(time.perf_counter() - began)
        found[f"cuda:0 to cuda:{other}"] = a.nbytes / statistics.median(seconds) / 1e9
    return found


def rank_sizes(text: str) -> tuple[int, int]:
    """Return the sizes that are written as 2x1. Raises SystemExit."""
    found = re.fullmatch(r"([1248])x([1248])", text)
    if found is None:
        raise SystemExit(f"--ranks {text}: write the sizes of both nodes, each 1, 2, 4 or 8, as 2x1")
    return int(found[1]), int(found[2])


HEAD = (
    f"{'transport':<34}{'tokens':>7}{'MiB':>7}{'sums':>6}{'write us':>10}{'GB/s':>8}{'pages/s':>10}"
    f"{'many GB/s':>11}{'call us':>9}{'sums us':>9}{'room us':>10}"
)


def line(row: dict[str, Any]) -> str:
    sums = "yes" if row["checksums"] else "no"
    if "state_mib" in row:
        return (
            f"{row['transport']:<34}{row['tokens']:>7}{row['pages_mib']:>7.0f}{sums:>6}  without state us "
            f"{row['pages_us']:.0f}, with {row['state_mib']:.1f} MiB of state {row['room_us']:.0f}, added "
            f"{row['added_us']:.0f}"
        )
    if "by" in row:
        return (
            f"{row['transport'] + ', forward by ' + row['by']:<34}{row['tokens']:>7}{sums:>13}"
            f"  forward us {row['forward_us']:.0f} (ratio {row['ratio']:.3f}), launch {row['launch_us']:.0f}, "
            f"behind {row['behind_us']:.0f}"
        )
    return (
        f"{row['transport']:<34}{row['tokens']:>7}{row['mib']:>7.0f}{sums:>6}"
        f"{row['write_us']:>10.0f}{row['gb_s']:>8.1f}{row['pages_s']:>10.0f}{row['many_gb_s']:>11.1f}"
        f"{row['call_us']:>9.0f}{row['sums_us']:>9.0f}{row['room_us']:>10.0f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--transports", nargs="+", default=["cuda_ipc", "shm", "tcp"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[64, 512, 2048, 8192])
    parser.add_argument("--shape", help="a model that keeps a state per request, with its bf16 planes")
    parser.add_argument(
        "--ranks", nargs="+", default=["1x1"], help="ranks of prefill and decode node, as 2x1"
    )
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    spec = None if arguments.shape is None else shape_spec(arguments.shape)
    if spec is not None and arguments.ranks != ["1x1"]:
        parser.error("states are measured between single ranks: leave out --ranks or --shape")
    gpus = torch.cuda.device_count()
    plans: list[tuple[str, tuple[str, str]]] = []
    pairs = [rank_sizes(text) for text in arguments.ranks]
    # Receiving GPUs; for states only the other one, if there is one.
    others = range(min(gpus, 2))[-1 if spec else 0 :]
    for name in arguments.transports:
        if name in ("cuda_ipc", "nixl") and gpus:
            plans += [(f"{name} 0 to {other}", ("cuda:0", f"cuda:{other}")) for other in others]
        if name != "cuda_ipc":
            plans.append((name, ("cpu", "cpu")))
    result: dict[str, Any] = {"about": "transfer", **describe(), "floors_gb_s": floors(gpus), "rows": []}
    print(json.dumps(result["floors_gb_s"]))
    print(HEAD)
    for name, devices in plans:
        sizes = arguments.tokens if devices[0] != "cpu" else [t for t in arguments.tokens if t <= 2048]
        for (prefill, decode), checksums in itertools.product(pairs, (True, False)):
            if spec is None:
                shown = name if prefill == decode == 1 else f"{name} ranks {prefill}x{decode}"
                rows = run(shown, devices, sizes, checksums, (prefill, decode))
            else:
                rows = run_state(name, devices, spec, sizes, checksums)
            for row in rows:
                print(line(row), flush=True)
            result["rows"] += rows
            if arguments.json:  # after every part, so that an interrupted run keeps its results
                arguments.json.parent.mkdir(parents=True, exist_ok=True)
                arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
