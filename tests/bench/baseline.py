"""Records the answers of every file of `deploy/clusters` on this machine's CPU as JSON, to guard a redesign.

`python -m tests.bench.baseline before.json` records token texts, log-probabilities, accept counters and graph tables of
each file, unchanged and with graphs on the tape. `--compare before.json` records again, names every value that differs
and then exits with 1. Requests are sent one at a time, so that each batch, and with it each float, is reproducible.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import json
import random
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from PIL import Image

from common.checkpoint.model_config import ModelConfig
from tests.cluster.harness import ROOT, Client, RunningCluster

CLUSTERS = ROOT / "deploy" / "clusters"
GRAPHS: dict[str, dict[str, Any]] = {"prefill": {"enforce_graphs": True}, "decode": {"graphs": "full"}}
PATHS = {"model": ("path",), "speculation": ("draft_model_path",)}
TIMED = {"seconds", "mib", "compile_seconds"}  # values of a graph report that vary between runs
COUNTERS = (
    *("prompt_tokens", "cached_tokens", "generated_tokens", "transfers", "transferred_pages"),
    *("spec_drafts", "spec_draft_tokens", "spec_accepted_tokens", "spec_accepted_at"),
)
QUESTION = "Q: Tom has 12 apples. He buys 7 more. How many apples does he have?\nA:"
SEEDED = {"temperature": 0.8, "top_p": 0.9, "seed": 17}
TOKENS = 24


def runs_on_cpu(sections: dict[str, Any]) -> bool:
    nodes = [*sections.get("prefill", {}).get("nodes", []), *sections.get("decode", {}).get("nodes", [])]
    devices = [each for node in nodes for each in node.get("devices", [node.get("device", "cpu")])]
    return all(each == "cpu" for each in devices)


def cluster_files() -> dict[str, dict[str, Any]]:
    """Return name -> sections of each file that a CPU can serve, with absolute model paths.

    example.yaml is left out, because it names no model.
    """
    found = {}
    for file in sorted(CLUSTERS.glob("*.yaml")):
        sections = yaml.safe_load(file.read_text())
        if file.stem == "example" or not runs_on_cpu(sections):
            continue
        for section, keys in PATHS.items():
            for key in keys:
                if key in sections.get(section, {}):
                    sections[section][key] = str((CLUSTERS / sections[section][key]).resolve())
        sections.get("model", {}).pop("served_name", None)
        sections.setdefault("model", {})["served_name"] = "baseline"
        found[file.stem] = sections
    return found


def prompts(vocab_size: int) -> list[list[int] | str]:
    """Return prompts: 1 to 300 random token ids, and text. Models with at least 700 tokens get the same ids."""
    rng = random.Random(5)
    lengths = (1, 2, 7, 16, 33, 64, 129, 300)
    ids = [[rng.randrange(3, 700) % vocab_size for _ in range(length)] for length in lengths]
    return [*ids, QUESTION, QUESTION * 5]


def picture() -> str:
    """Return the data URL of a small picture with edges and a gradient."""
    pixels = Image.new("RGB", (48, 32))
    pixels.putdata([(5 * x, 7 * y, 255 if x > y else 0) for y in range(32) for x in range(48)])
    file = io.BytesIO()
    pixels.save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


async def answers(client: Client, vocab_size: int, vision: bool, scored: bool) -> dict[str, Any]:
    """Send one request at a time and return the answers: greedy, seeded, and about a picture if the model sees.

    `scored`: with the log-probability of each token.
    """
    found: dict[str, Any] = {}
    for index, prompt in enumerate(prompts(vocab_size)):
        for name, fields in (("greedy", dict[str, Any]()), ("seeded", SEEDED)):
            body: dict[str, Any] = {
                "model": "baseline",
                "prompt": prompt,
                "max_tokens": TOKENS,
                "temperature": 0,
                "logprobs": 2,
            }
            body |= {"ignore_eos": True, "skip_special_tokens": False, **fields}
            async with client.session.post("/v1/completions", json=body, raise_for_status=True) as response:
                answer = await response.json()
            chosen = answer["choices"][0]["logprobs"]
            found[f"{name} {index}"] = [chosen["tokens"], chosen["token_logprobs"] if scored else None]
    if vision:
        parts = [
            {"type": "image_url", "image_url": {"url": picture()}},
            {"type": "text", "text": "What is in the picture?"},
        ]
        body = {"model": "baseline", "messages": [{"role": "user", "content": parts}], "temperature": 0}
        async with client.session.post(
            "/v1/chat/completions", json=body | {"max_tokens": TOKENS}, raise_for_status=True
        ) as response:
            answer = await response.json()
        found["picture"] = answer["choices"][0]["message"]["content"]
    return found


def node_facts(node: dict[str, Any], counted: bool) -> dict[str, Any]:
    """Return graph table and, if `counted`, counters of a node, without values measured in seconds."""
    graphs = [
        {key: value for key, value in report.items() if key not in TIMED} for report in node.get("graphs", [])
    ]
    counters = {key: node["counters"][key] for key in COUNTERS} if counted else {}
    return {"graphs": graphs, "total_pages": node["load"]["total_pages"], **counters}


def cluster_of(directory: Path, sections: dict[str, Any]) -> RunningCluster:
    """Return a cluster, not running yet, with the nodes and ranks of a file and the ports of the harness."""
    rest = {name: dict(values) for name, values in sections.items()}
    for key in ("port", "control_address"):
        rest.get("router", {}).pop(key, None)
    movable = {node["name"] for node in rest.pop("movable", {}).get("nodes", [])}
    counts, ranks = dict[str, int](), dict[str, int]()
    for role in ("prefill", "decode"):
        nodes = rest.get(role, {}).pop("nodes", [{"name": f"{role}-0"}])
        counts[role] = sum(node["name"] not in movable for node in nodes)
        ranks |= {node["name"]: node.get("tensor_parallel", 1) for node in nodes}
    return RunningCluster(
        directory,
        counts["prefill"],
        counts["decode"],
        rest,
        ranks=ranks,
        movable=len(movable),
        pool_tokens="auto",
    )


async def record(sections: dict[str, Any]) -> dict[str, Any]:
    """Start the cluster, record its answers, stop it.

    Which of several nodes gets a request depends on the time, and with it the part of the prompt that is cached there:
    counters and the last digits of log-probabilities differ between runs, so both are left out.
    """
    vision = "vision" in sections["model"]["path"]
    reproducible = all(len(sections.get(role, {}).get("nodes", ())) <= 1 for role in ("prefill", "decode"))
    vocab_size = ModelConfig.load(Path(sections["model"]["path"])).vocab_size
    with tempfile.TemporaryDirectory() as directory:
        async with (
            cluster_of(Path(directory), sections) as cluster,
            Client(cluster.url) as client,
        ):
            found = await answers(client, vocab_size, vision, reproducible)
            async with cluster.operator() as operator:
                await operator.wait_idle()
                nodes = (await operator.info())["nodes"]
    return {"answers": found, "nodes": {node["name"]: node_facts(node, reproducible) for node in nodes}}


async def record_all(only: list[str]) -> dict[str, Any]:
    found = {}
    for name, sections in cluster_files().items():
        for variant, graphs in (("as it is", {}), ("graphs", GRAPHS)):
            if only and name not in only:
                continue
            merged = {
                **sections,
                **{role: {**sections.get(role, {}), **graphs.get(role, {})} for role in GRAPHS},
            }
            found[f"{name}, {variant}"] = await record(merged)
            print(f"{name}, {variant}: recorded", file=sys.stderr, flush=True)
    return found


def differences(before: Any, after: Any, path: str = "") -> Iterator[str]:
    """Return a line for each value that differs."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in {**before, **after}:
            yield from differences(before.get(key), after.get(key), f"{path} > {key}" if path else str(key))
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for index, (one, other) in enumerate(zip(before, after, strict=True)):
            yield from differences(one, other, f"{path}[{index}]")
    elif before != after:
        yield f"{path}: {before!r} before, {after!r} now"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="where the recording goes")
    parser.add_argument("--compare", type=Path, help="an earlier recording of this machine")
    parser.add_argument("--only", nargs="+", default=[], help="names of cluster files (default: all)")
    arguments = parser.parse_args()
    found = json.loads(json.dumps(asyncio.run(record_all(arguments.only))))
    arguments.out.write_text(json.dumps(found, indent=1))
    if arguments.compare is not None:
        before = json.loads(arguments.compare.read_text())
        lines = list(differences({name: before.get(name) for name in found}, found))
        print("\n".join(lines) or f"equal: {len(found)} recordings")
        sys.exit(bool(lines))


if __name__ == "__main__":
    main()
