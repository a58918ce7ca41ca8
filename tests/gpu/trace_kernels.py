"""Sums up the CUDA kernels of a trace that a node's profile has written.

    python -m tests.gpu.trace_kernels ANSWER SUMMARY

ANSWER is the file with what `POST /workers/NAME/profile` answered; SUMMARY is written, as JSON: the size of the trace,
its events, and its kernels, of which the ones that took longest are named.
"""

from __future__ import annotations

import gzip
import json
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

NAMED = 20
SHOWN = 100  # characters of a kernel's name


def summary(events: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the number of events, and number and time of kernels."""
    count, calls, micros = 0, Counter[str](), Counter[str]()
    for event in events:
        count += 1
        if event.get("cat") == "kernel":
            calls[event["name"]] += 1
            micros[event["name"]] += event.get("dur", 0)
    top = [
        {"ms": ms / 1e3, "calls": calls[name], "name": name[:SHOWN]} for name, ms in micros.most_common(NAMED)
    ]
    return {"events": count, "kernels": calls.total(), "kernel_ms": micros.total() / 1e3, "top": top}


def main(arguments: list[str]) -> None:
    answer = json.loads(Path(arguments[0]).read_text())
    trace = Path(answer["path"])
    with gzip.open(trace, "rt") as file:
        events = json.load(file)["traceEvents"]
    found = {"profile": answer, "bytes": trace.stat().st_size, **summary(events)}
    Path(arguments[1]).write_text(json.dumps(found, indent=1))
    kernels, steps = f"{found['kernels']} kernels, {found['kernel_ms']:.1f} ms", answer.get("num_steps")
    print(f"{answer['name']}: {kernels}, in {steps} steps and {answer['seconds']} s", end="; ")
    print(f"{found['events']} events, {found['bytes']} bytes")
    for each in found["top"]:
        print(f"  {each['ms']:9.3f} ms {each['calls']:6} {each['name']}")


if __name__ == "__main__":
    main(sys.argv[1:])
