"""Compares texts of nodes with several ranks, whose processes are killed and stopped meanwhile, with those of one rank.

    python -m tests.cluster.check_ranks [SECONDS] [SEED]

CI has no time for it. Each cluster has two nodes per role, the first with ranks, and serves requests that are greedy or
seeded, while one process of a node is killed or stopped, or the whole node is stopped for a while. Requests have to
continue elsewhere with the same text, the node has to end or to go on, and no page may be lost. The combinations
contain as many pairs of values (sizes, transports, algorithms, formats ... signals, ranks, moments) as there is time
for. Sizes count where a request was placed on two nodes of these sizes, and with a fault where one of these nodes had
it. All pairs take about 25 clusters. It prints a line of JSON per fault and one with the counts. The exit code is 1 if
anything was wrong. Greedy texts count up to the first near-tie, which rounding may decide the other way.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from common.process_entry import start_time
from deploy.eval_cli import picture_body
from deploy.tiny_models.vision.questions import questions
from tests.cluster.conftest import prompt_of
from tests.cluster.covering_rows import Covering, Row
from tests.cluster.harness import MODEL, Client, RunningCluster
from tests.cluster.test_nixl import installed
from tests.fakes.proc_files import with_children
from tests.fakes.waiting import PATIENCE, eventually

MODELS = MODEL.parent
SAID = 60  # tokens per answer
REQUESTS = 9
FAULTS = 3  # per cluster
FROZEN_SECONDS = 6.0
# Nats between the two likeliest tokens, below which another order of sums may choose the other one. With FP8 weights,
# ranks also round other numbers, as each quantises its part of the inputs of a divided product by a scale of its own:
# logits of tiny-target differ by up to 3 between one rank and two or four, as much as FP8 differs from float32 there.
CLEAR = {"float32": 1e-3, "fp8": 6.0, "fp8 pages": 0.3}

# algorithm -> (model, section `speculation`)
ALGORITHMS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("tiny-target", {}),
    "ngram": ("tiny-target", {"algorithm": "ngram", "steps": 4}),
    "eagle3": ("tiny-target", {"algorithm": "eagle3", "draft_model_path": "tiny-eagle3", "steps": 3}),
    "standalone": (
        "tiny-target",
        {"algorithm": "standalone", "draft_model_path": "tiny-standalone", "steps": 3},
    ),
    "mtp": ("tiny-hybrid", {"algorithm": "mtp", "draft_model_path": "tiny-hybrid", "steps": 3}),
    "experts": ("tiny-moe", {"algorithm": "eagle3", "draft_model_path": "tiny-moe-eagle3", "steps": 3}),
    "images": ("tiny-vision", {"algorithm": "eagle3", "draft_model_path": "tiny-vision-eagle3", "steps": 3}),
}
FORMATS: dict[str, dict[str, Any]] = {
    "float32": {},
    "fp8": {"model": {"quantization": "fp8"}},
    "fp8 pages": {"kv": {"dtype": "fp8"}},
}
# Ranks of the first node of each role -> (prefill size)x(decode size) of a request there; the second node has one.
SHAPES = {
    (2, 2): ("2x2", "2x1", "1x2"),
    (2, 4): ("2x4", "2x1", "1x4"),
    (4, 2): ("4x2", "4x1", "1x2"),
}
DIMENSIONS = {
    "sizes": ("1x2", "2x1", "2x2", "2x4", "4x2", "4x1", "1x4"),
    "transport": ("shm", "tcp", *(("nixl",) if installed() else ())),
    "algorithm": tuple(ALGORITHMS),
    "format": tuple(FORMATS),
    "pool": ("large", "small"),
    "graphs": ("none", "captured"),
    "signal": ("kill", "stop", "freeze"),
    "role": ("prefill", "decode"),
    "rank": ("first", "last"),
    "moment": ("prompt", "first token", "decoding"),
}
OF_FAULT = ("sizes", "signal", "role", "rank", "moment")


@dataclass(frozen=True)
class Expected:
    """What one rank says to a request."""

    text: str
    clear: int  # tokens before the first near-tie
    tokens: list[str]

    def agrees(self, text: str) -> bool:
        if self.clear == len(self.tokens):
            return text == self.text
        return text.startswith("".join(self.tokens[: self.clear]))


def config_of(row: Row) -> dict[str, Any]:
    """Return the sections of a cluster file."""
    model, speculation = ALGORITHMS[row["algorithm"]]
    if "draft_model_path" in speculation:
        speculation = speculation | {"draft_model_path": str(MODELS / speculation["draft_model_path"])}
    captured = row["graphs"] == "captured"
    config: dict[str, Any] = {
        "model": {"path": str(MODELS / model), "served_name": "tiny"},
        # Two policies that take turns would always choose the same pairs: of prefill nodes, one is drawn.
        "router": {
            "placement": {"prefill": "least_loaded", "decode": "round_robin", "temperature_ms": 1e6},
            "queue_wait": 600.0,
        },
        "speculation": speculation,
        "prefill": {"graphs": "breakable" if captured else "none", "chunk_tokens": 128},
        "decode": {"graphs": "full" if captured else "none"},
        "transfer": {"transport": row["transport"]},
        "security": {"isolated_network": True} if row["transport"] == "nixl" else {},
        "health": {"loop_timeout": 5.0, "node_timeout": 5.0, "hang_timeout": 60.0, "slow_start": 0.0},
    }
    if row["pool"] == "small":
        config["decode"] |= {"pool_tokens": 640, "reserved_tokens": 0}
    for section, values in FORMATS[row["format"]].items():
        config.setdefault(section, {}).update(values)
    return config


def bodies(row: Row) -> list[dict[str, Any]]:
    """Return requests: greedy ones and seeded ones, in turns; with pictures if the model sees."""
    if row["algorithm"] == "images":
        asked = [
            picture_body(question) | {"max_tokens": SAID}
            for question in islice(questions(7, "heldout"), REQUESTS)
        ]
    else:
        asked = [{"prompt": prompt_of(30 + 43 * i, i), "max_tokens": SAID} for i in range(REQUESTS)]
    common = {"ignore_eos": True, "skip_special_tokens": False}
    seeded = {"temperature": 0.8, "seed": 5}
    # Texts of seeded draws are compared as a whole, which only float32 permits.
    draws = [seeded if i % 3 == 2 and row["format"] == "float32" else {} for i in range(REQUESTS)]
    return [{"temperature": 0, **body, **common, **draw} for body, draw in zip(asked, draws, strict=True)]


async def ask(client: Client, body: dict[str, Any]) -> dict[str, Any]:
    """Return the first choice of an answer."""
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    async with client.session.post(path, json=body) as response:
        answer = await response.json()
        if response.status != 200:
            raise RuntimeError(f"{response.status}: {answer}")
    choice: dict[str, Any] = answer["choices"][0]
    return choice


def text_of(choice: dict[str, Any]) -> str:
    return str(choice["message"]["content"] if "message" in choice else choice["text"])


async def expected_of(client: Client, body: dict[str, Any], clear: float) -> Expected:
    """Ask one rank. The likeliest tokens are shown for greedy requests only."""
    if body["temperature"]:
        text = text_of(await ask(client, body))
        return Expected(text, 0, [])
    chat = "messages" in body
    choice = await ask(client, body | ({"logprobs": True, "top_logprobs": 2} if chat else {"logprobs": 2}))
    if chat:
        content = choice["logprobs"]["content"]
        tokens = [each["token"] for each in content]
        best = [sorted((top["logprob"] for top in each["top_logprobs"]), reverse=True) for each in content]
    else:
        tokens = choice["logprobs"]["tokens"]
        best = [sorted(each.values(), reverse=True) for each in choice["logprobs"]["top_logprobs"]]
    ties = (i for i, each in enumerate(best) if len(each) < 2 or each[0] - each[1] < clear)
    return Expected(text_of(choice), next(ties, len(tokens)), tokens)


class References:
    """The texts of one rank, by model and format; each cluster of one rank runs once."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], list[Expected]] = {}

    async def of(self, row: Row) -> list[Expected]:
        key = ALGORITHMS[row["algorithm"]][0], row["format"]
        if key not in self._found:
            plain = {**row, "graphs": "none", "pool": "large", "transport": "shm"}
            config = config_of(plain) | {"speculation": {}}
            with tempfile.TemporaryDirectory() as directory:
                async with RunningCluster(Path(directory), config=config) as cluster:
                    async with Client(cluster.url) as client:
                        asked = (expected_of(client, each, CLEAR[row["format"]]) for each in bodies(row))
                        self._found[key] = list(await asyncio.gather(*asked))
        return self._found[key]


def cluster_of(row: Row, shape: tuple[int, int], directory: Path) -> RunningCluster:
    """Return a cluster that has not started: in each role a node of several ranks and one of a single rank."""
    prefill, decode = shape
    cluster = RunningCluster(
        directory, 2, 2, config_of(row), ranks={"prefill-0": prefill, "decode-0": decode}
    )
    if row["algorithm"] == "experts":
        sections = yaml.safe_load(cluster.file.read_text())
        for node in (*sections["prefill"]["nodes"], *sections["decode"]["nodes"]):
            node["expert_parallel"] = node["tensor_parallel"] > 1
        cluster.file.write_text(yaml.safe_dump(sections))
    return cluster


def nodes_of(sizes: str) -> dict[str, str]:
    """Return the node of each role on which requests have these sizes; the first nodes have more than one rank."""
    return {
        role: f"{role}-{int(size == '1')}"
        for role, size in zip(("prefill", "decode"), sizes.split("x"), strict=True)
    }


async def sizes_seen(cluster: RunningCluster, node: str = "") -> set[str]:
    """Return the sizes on which the last requests were placed, with `node` those where it was one of the two."""
    async with cluster.operator() as client:
        async with client.session.get("/requests", params={"limit": REQUESTS}) as response:
            said = (await response.json())["requests"]
    placed = {(each["prefill"], each["decode"]) for request in said for each in request["nodes"]}
    ranks = {name: cluster.ranks.get(name, 1) for name in cluster.names}
    return {f"{ranks[one]}x{ranks[other]}" for one, other in placed if node in ("", one, other)}


async def reached(client: Client, row: Row, node: str) -> None:
    """Wait until the node is at the moment of the fault, or has been there."""
    deadline = time.monotonic() + PATIENCE
    wanted: dict[str, Callable[[dict[str, Any]], bool]] = {
        "prompt": lambda found: bool(found["counters"]["requests"]),
        "first token": lambda found: bool(found["load"]["transferring"] or found["counters"]["transfers"]),
        "decoding": lambda found: bool(found["load"]["running"] or found["counters"]["generated_tokens"]),
    }
    watched = node if row["moment"] == "prompt" else nodes_of(row["sizes"])["decode"]
    while not wanted[row["moment"]](await client.node(watched)) and time.monotonic() < deadline:
        await asyncio.sleep(0.02)


async def fault(cluster: RunningCluster, row: Row, references: list[Expected]) -> tuple[str, set[str]]:
    """Inject one fault. Return what was wrong, and the sizes of requests that the node had."""
    node, last = nodes_of(row["sizes"])[row["role"]], row["rank"] == "last"
    process, ranks = cluster.processes[node], cluster.rank_pids(node)
    victim = ranks[-1] if last and ranks else process.pid
    async with Client(cluster.url) as client:
        running = [asyncio.create_task(ask(client, body)) for body in bodies(row)]
        await reached(client, row, node)
        if row["signal"] == "freeze":
            stopped = [int(each.name) for each in with_children(Path(f"/proc/{process.pid}"))]
            for pid in stopped:
                os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(FROZEN_SECONDS)
            for pid in stopped:
                os.kill(pid, signal.SIGCONT)
        else:
            os.kill(victim, signal.SIGKILL if row["signal"] == "kill" else signal.SIGSTOP)
        goes_on = row["signal"] == "freeze" or (row["signal"] == "stop" and victim == process.pid)
        if row["signal"] == "stop" and goes_on:
            # A small pool may have no room for a long request while a stopped prefill node keeps pages in quarantine.
            await client.gone(node)
            await asyncio.sleep(FROZEN_SECONDS)
            os.kill(victim, signal.SIGCONT)
        answers = [text_of(choice) for choice in await asyncio.gather(*running)]
        wrong = compared(answers, bodies(row), references)
        seen = await sizes_seen(cluster, node)
        if not goes_on:
            await asyncio.to_thread(process.wait, 2 * PATIENCE)
            for pid in ranks:
                await eventually(partial(has_ended, pid))
            cluster.launch(node)
        await cluster.wait_nodes()
        if goes_on and (process.poll() is not None or cluster.rank_pids(node) != ranks):
            wrong.append("the node has ended")
        await client.wait_idle()
        again = [text_of(await ask(client, body)) for body in bodies(row)[:4]]
        wrong += [f"{each} afterwards" for each in compared(again, bodies(row), references)]
    return "; ".join(wrong), seen


def has_ended(pid: int) -> bool:
    return start_time(pid) is None


def compared(answers: list[str], asked: list[dict[str, Any]], references: list[Expected]) -> list[str]:
    """Return which answers differ from those of one rank."""
    found = []
    for index, (answer, body, expected) in enumerate(zip(answers, asked, references, strict=False)):
        right = answer == expected.text if body["temperature"] else expected.agrees(answer)
        if not right:
            found.append(f"request {index}: {answer!r} instead of {expected.text!r}, clear {expected.clear}")
    return found


async def run_cluster(
    row: Row, covering: Covering, references: list[Expected], until: float, counts: Counter[str]
) -> None:
    """Run one cluster without a fault and with some; count the faults by result."""
    fixed = {name: value for name, value in row.items() if name not in OF_FAULT}
    shape = max(
        (each for each in SHAPES if row["sizes"] in SHAPES[each]),
        key=lambda each: sum(covering.gain({**fixed, "sizes": sizes}) for sizes in SHAPES[each]),
    )
    with tempfile.TemporaryDirectory() as directory:
        async with cluster_of(row, shape, Path(directory)) as cluster:
            async with Client(cluster.url) as client:
                answers = [
                    text_of(each)
                    for each in await asyncio.gather(*(ask(client, body) for body in bodies(row)))
                ]
            problem = "; ".join(compared(answers, bodies(row), references))
            counts["undisturbed wrong" if problem else "undisturbed right"] += 1
            for sizes in await sizes_seen(cluster):
                covering.cover({**fixed, "sizes": sizes})
            for index in range(FAULTS):
                if index and time.monotonic() > until:
                    break
                each = covering.best(fixed, {"sizes": SHAPES[shape]})
                found, seen = await fault(cluster, each, references)
                problem = "; ".join(filter(None, (problem, found)))
                for sizes in seen:
                    covering.cover({**each, "sizes": sizes})
                counts["wrong" if problem else "right"] += 1
                print(json.dumps({**each, "seen": sorted(seen), "problem": problem}), flush=True)
                problem = ""


async def run(seconds: float, seed: int) -> int:
    """Run clusters until the time has passed, and return the exit code."""
    covering, references = Covering(DIMENSIONS, seed), References()
    until = time.monotonic() + seconds
    counts: Counter[str] = Counter()
    while time.monotonic() < until and covering.left:
        row = covering.best({})
        try:
            await run_cluster(row, covering, await references.of(row), until, counts)
        except Exception as error:
            counts["failed"] += 1
            print(json.dumps({**row, "problem": f"{type(error).__name__}: {error}"[:3000]}), flush=True)
    covered = covering.all - len(covering.left)
    print(json.dumps({"counts": counts, "pairs": f"{covered} of {covering.all}"}), flush=True)
    return int(any(counts[name] for name in ("wrong", "undisturbed wrong", "failed")))


if __name__ == "__main__":
    _, for_seconds, seed = [*sys.argv, *("600", "1")[len(sys.argv) - 1 :]]
    sys.exit(asyncio.run(run(float(for_seconds), int(seed))))
