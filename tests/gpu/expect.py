"""Checks on the results of this folder's scripts; prints a sentence and exits with code 1 if a check fails.

python -m tests.gpu.expect score FILE LEAST          # JSON of deploy/eval: share of right answers
python -m tests.gpu.expect replays FILE              # /server_info: graphs captured whole, and forwards replay them
python -m tests.gpu.expect accepts FILE LEAST        # /server_info: accept length of the first decode node
python -m tests.gpu.expect tokens FILE COUNT         # answer of /v1/completions: completion tokens
python -m tests.gpu.expect no_fallbacks FILE         # /server_info: decode nodes and captured phases only replay
python -m tests.gpu.expect sooner FILE EAGER SHARE   # JSON of tests.bench.serve: first token that much below EAGER
python -m tests.gpu.expect tier FILE ENGINE          # JSON of conversations.py: the last round comes from host memory
python -m tests.gpu.expect kernels FILE              # JSON of trace_kernels.py: a profile has CUDA kernels
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MIN_REPLAYED = 0.95  # share of a phase's forwards
MIN_FOUND, MAX_RECEIVED = 0.9, 0.05  # shares of the prompt tokens of a round


def score(report: dict[str, Any], least: str) -> Iterator[str]:
    if report["errors"]:
        yield f"{report['errors']} of {report['count']} questions failed, the first with: {report['first_error']}"
    if report["score"] < float(least):
        yield f"{report['right']} of {report['count']} answers are right; at least {float(least):.0%} were expected"


def replays(info: dict[str, Any]) -> Iterator[str]:
    nodes = info["nodes"]
    if not nodes:
        yield "no node is registered"
    for node in nodes:
        for told in node["graphs"]:
            if told["failed"]:
                yield f"{node['name']}: graphs of {told['phase']} ({told['model']}) failed: {told['failed']}"
        for total in node["counters"]["graphs"]:
            yield from _replayed(node["name"], total)


def no_fallbacks(info: dict[str, Any]) -> Iterator[str]:
    yield from replays(info)
    for node in info["nodes"]:
        for total in node["counters"]["graphs"]:
            if (total["captured"] or node["role"] == "decode") and any(total["fallbacks"].values()):
                yield f"{node['name']}: fallbacks of {total['phase']} ({total['model']}): {total['fallbacks']}"


def sooner(served: dict[str, Any], eager_file: str, share: str) -> Iterator[str]:
    eager = json.loads(Path(eager_file).read_text())
    ours, theirs = (report["levels"][0]["ttft_ms_p50"] for report in (served, eager))
    if ours > (1 - float(share)) * theirs:
        yield (
            f"first tokens take {ours:.2f} ms with graphs and {theirs:.2f} ms without: {1 - ours / theirs:.0%} less; "
            f"at least {float(share):.0%} less was expected"
        )


def _replayed(node: str, total: dict[str, Any]) -> Iterator[str]:
    replayed, eager = total["replays"], sum(total["fallbacks"].values())
    if total["captured"] and replayed < MIN_REPLAYED * (replayed + eager):
        yield (
            f"{node}: {replayed} of {replayed + eager} forwards of {total['phase']} "
            f"({total['model']}) replayed a graph; "
            f"the others: {total['fallbacks']}"
        )


def accepts(info: dict[str, Any], least: str) -> Iterator[str]:
    length = info["internal_states"][0]["avg_spec_accept_length"]
    if length < float(least):
        yield f"the accept length is {length:.2f}; at least {least} was expected"


def tokens(answer: dict[str, Any], count: str) -> Iterator[str]:
    found = answer.get("usage", {}).get("completion_tokens")
    if found != int(count):
        yield f"{found} completion tokens; {count} were expected: {str(answer)[:300]}"


def tier(report: dict[str, Any], engine: str) -> Iterator[str]:
    after = [report["before"], *(each["after"] for each in report["rounds"])]
    prompts, own = report["prompt_tokens"], [each[engine] for each in after]
    first = own[1]["received"] - own[0]["received"]
    if first < MIN_FOUND * prompts:
        yield f"{engine} received {first:.0f} of {prompts} prompt tokens in the first round: it had some of them"
    found, received = (own[-1][name] - own[-2][name] for name in ("hits", "received"))
    if found < MIN_FOUND * prompts:
        yield f"{engine} found {found:.0f} of {prompts} prompt tokens in host memory in the last round"
    if received > MAX_RECEIVED * prompts:
        yield f"{engine} received {received:.0f} of {prompts} prompt tokens in the last round"
    for name, counted in after[-1].items():
        for wrong in ("checksum_failures", "missing_marks"):
            if counted.get(wrong):
                yield f"{name}: {wrong} is {counted[wrong]:.0f}"


def kernels(found: dict[str, Any]) -> Iterator[str]:
    if not found["kernels"] or not found["kernel_ms"]:
        file = f"{found['profile']['path']} ({found['bytes']} bytes)"
        yield f"no CUDA kernel among the {found['events']} events of {file}"


CHECKS = {
    check.__name__: check for check in (score, replays, accepts, tokens, no_fallbacks, sooner, tier, kernels)
}


def main(arguments: list[str]) -> int:
    name, file, *rest = arguments
    try:
        problems = list(CHECKS[name](json.loads(Path(file).read_text()), *rest))
    except (OSError, ValueError, KeyError, IndexError) as error:
        problems = [f"{file} cannot be checked: {error!r}"]
    for problem in problems:
        print(f"{name}: {problem}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
