"""Time to first token of prompts with one picture and one client: the cost of the vision part and the prompt forward.

    python -m tests.bench.vision http://127.0.0.1:8000 [--count 50] [--json FILE]

Start deploy/clusters/local-vision.yaml, once with --set prefill.graphs=breakable and once with none. Every picture is
new, so nothing of it is cached. The same questions are also timed without their pictures.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from itertools import islice
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from deploy.eval_cli import picture_body
from deploy.tiny_models.vision.questions import Question, questions


async def first_token_ms(session: aiohttp.ClientSession, body: dict[str, Any]) -> float:
    started = time.perf_counter()
    async with session.post(
        "/v1/chat/completions", json=body | {"stream": True, "max_tokens": 1}
    ) as response:
        assert response.status == 200, await response.text()
        async for line in response.content:
            if b'"content":' in line:
                break
        taken = time.perf_counter() - started
        await response.read()
    return taken * 1e3


async def measure(url: str, count: int, seed: int) -> dict[str, Any]:
    asked = list(islice((q for q in questions(seed, "heldout") if len(q.images) == 1), count + 3))
    plain = [Question(each.kind, (), each.text, each.answer) for each in asked]
    async with aiohttp.ClientSession(url) as session:
        async with session.get("/server_info") as response:
            nodes = (await response.json())["nodes"]
        seen = [await first_token_ms(session, picture_body(each)) for each in asked][3:]  # skips the warm-up
        text = [await first_token_ms(session, picture_body(each)) for each in plain][3:]
    prefill = next(node for node in nodes if node["role"] == "prefill")
    backends = " ".join(dict.fromkeys(row["backend"] for row in prefill["graphs"]))
    result = {"count": count, "graphs": backends, "device": prefill["config"]["device"]}
    for name, times in (("picture", seen), ("text", text)):
        p50, p99 = np.percentile(times, (50, 99))
        result |= {f"{name}_p50_ms": round(float(p50), 2), f"{name}_p99_ms": round(float(p99), 2)}
    return result


def main() -> None:
    """Measure a running cluster."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("url")
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    result = asyncio.run(measure(args.url, args.count, args.seed))
    print(json.dumps(result))
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
