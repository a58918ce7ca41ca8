"""Restarts every process of a cluster under load, one after the other: two routers, two nodes of each role.

    python -m tests.cluster.check_restarts [ROUNDS]

CI has no time for it. Clients stream answers all the while, half of them over a connection that stays open and half
over a new one for each request. Each process gets SIGTERM, has to end with exit code 0, and is started again; the next
one follows when every router serves with all nodes. It prints a line of JSON per restart and one with the counts. The
exit code is 1 if a request failed, an answer differed from an undisturbed one, or a process ended otherwise.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from tests.cluster.harness import Client, RunningCluster
from tests.fakes.waiting import PATIENCE

CLIENTS = 8
PROMPTS = [[7 + 13 * number + 3 * at for at in range(40 + 60 * number)] for number in range(4)]
TOKENS = (8, 60)  # short and long answers
PAUSE = 2.0  # seconds of load between two restarts


@dataclass
class Load:
    """Clients that send one request after the other until `over`."""

    url: str
    expected: dict[tuple[int, int], str] = field(default_factory=dict)  # (prompt, tokens) -> text
    counts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    over: bool = False

    async def client(self, number: int) -> None:
        """`number`: odd ones keep their connection."""
        done = 0
        async with Client(self.url) as kept:
            while not self.over:
                case = (number + done) % len(PROMPTS), TOKENS[done % len(TOKENS)]
                try:
                    if number % 2:
                        text = await streamed(kept, *case)
                    else:
                        async with Client(self.url) as fresh:
                            text = await streamed(fresh, *case)
                except (aiohttp.ClientError, OSError, RuntimeError) as error:
                    self.counts["failed"] += 1
                    self.problems.append(f"{'kept' if number % 2 else 'new'} connection: {error!r}"[:500])
                else:
                    same = text == self.expected[case]
                    self.counts["right" if same else "wrong"] += 1
                done += 1


async def streamed(client: Client, prompt: int, tokens: int) -> str:
    """Return the text of a streamed answer. Raises RuntimeError for an error or an answer that is not complete."""
    body = {"prompt": PROMPTS[prompt], "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    text, ended = "", False
    async with client.session.post("/v1/completions", json={**body, "stream": True}) as response:
        if response.status != 200:
            raise RuntimeError(f"{response.status}: {await response.text()}")
        async for line in response.content:
            data = line.removeprefix(b"data: ").strip()
            if data == b"[DONE]":
                ended = True
            elif data:
                event = json.loads(data)
                if "error" in event:
                    raise RuntimeError(data.decode())
                text += "".join(choice["text"] for choice in event["choices"])
    if not ended:
        raise RuntimeError("the stream ended without [DONE]")
    return text


async def restart(cluster: RunningCluster, name: str) -> dict[str, object]:
    """End a process, start it again and wait until every router serves with all nodes."""
    process, began = cluster.processes[name], time.monotonic()
    process.send_signal(signal.SIGTERM)
    await asyncio.to_thread(process.wait, PATIENCE)
    ended = time.monotonic()
    cluster.launch(name)
    await cluster.wait_nodes(PATIENCE)
    back = time.monotonic()
    return {
        "restarted": name,
        "exit_code": process.returncode,
        "drained_s": round(ended - began, 2),
        "back_s": round(back - ended, 2),
    }


async def run(rounds: int) -> int:
    """Restart everything `rounds` times; return the exit code of the program."""
    exit_codes = set()
    with tempfile.TemporaryDirectory() as directory:
        async with RunningCluster(Path(directory), 2, 2, routers=2) as cluster:
            load = Load(cluster.url)
            async with Client(cluster.url) as client:
                for prompt in range(len(PROMPTS)):
                    for tokens in TOKENS:
                        load.expected[prompt, tokens] = await streamed(client, prompt, tokens)
            clients = [asyncio.create_task(load.client(number)) for number in range(CLIENTS)]
            for name in [each for _ in range(rounds) for each in cluster.names]:
                await asyncio.sleep(PAUSE)
                done = await restart(cluster, name)
                exit_codes.add(done["exit_code"])
                print(json.dumps({**done, **load.counts}), flush=True)
            await asyncio.sleep(PAUSE)
            load.over = True
            await asyncio.wait_for(asyncio.gather(*clients), PATIENCE)
            for name in cluster.router_names:
                async with cluster.at(name) as client:
                    await client.wait_idle()
    print(json.dumps({**load.counts, "problems": load.problems}), flush=True)
    return int(exit_codes != {0} or load.counts["failed"] > 0 or load.counts["wrong"] > 0)


if __name__ == "__main__":
    sys.exit(asyncio.run(run(int(sys.argv[1]) if len(sys.argv) > 1 else 1)))
