"""Restarts every process of a cluster under load, and changes a role: two routers, two nodes of each role.

    python -m tests.cluster.check_restarts [ROUNDS]

CI has no time for it. One of the decode nodes is movable. Clients stream answers all the while, half of them over a
connection that stays open and half over a new one for each request. Each process gets SIGTERM, has to end with exit
code 0, and is started again; the next one follows when every router serves with all nodes. Then the movable node
becomes a prefill node and a decode node again, and has to get requests in each role. It prints a line of JSON per
restart and change, and one with the counts. The exit code is 1 if a request failed, an answer differed from an
undisturbed one, a process ended otherwise, or a change was refused.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from tests.cluster.harness import Client, RunningCluster
from tests.fakes.waiting import PATIENCE

CLIENTS = 8
PROMPTS = [[7 + 13 * number + 3 * at for at in range(40 + 60 * number)] for number in range(4)]
TOKENS = (8, 60)  # short and long answers
PAUSE = 2.0  # seconds of load between two disturbances
MOVABLE = "flex-0"  # a decode node at first


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


async def streamed(
    client: Client, prompt: int, tokens: int, begun: Callable[[], object] = lambda: None
) -> str:
    """Return the text of a streamed answer. Raises RuntimeError for an error or an answer that is not complete.

    `begun`: called when the head of the answer has arrived.
    """
    body = {"prompt": PROMPTS[prompt], "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    text, ended = "", False
    async with client.session.post("/v1/completions", json={**body, "stream": True}) as response:
        if response.status != 200:
            raise RuntimeError(f"{response.status}: {await response.text()}")
        begun()
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


async def change_role(cluster: RunningCluster, role: str) -> dict[str, object]:
    """Change the role of the movable node, and wait until requests have been placed on it there."""
    began = time.monotonic()
    async with cluster.operator() as operator:
        async with operator.session.post(f"/workers/{MOVABLE}/role", json={"role": role}) as response:
            status, answer = response.status, await response.json()
        changed = time.monotonic()
        async with asyncio.timeout(PATIENCE):
            while status == 200 and not (await operator.node(MOVABLE))["assigned"]:
                await asyncio.sleep(0.01)
    used = time.monotonic()
    return {
        "changed": MOVABLE,
        "status": status,
        **answer,
        "change_s": round(changed - began, 2),
        "used_s": round(used - changed, 2),
    }


async def disturb(cluster: RunningCluster, load: Load, rounds: int) -> bool:
    """Restart everything and change a role `rounds` times; return whether each process and change ended well."""
    well = True
    for _ in range(rounds):
        for name in cluster.names:
            await asyncio.sleep(PAUSE)
            done = await restart(cluster, name)
            well = well and done["exit_code"] == 0
            print(json.dumps({**done, **load.counts}), flush=True)
        for role in ("prefill", "decode"):
            await asyncio.sleep(PAUSE)
            done = await change_role(cluster, role)
            well = well and done["status"] == 200
            print(json.dumps({**done, **load.counts}), flush=True)
    await asyncio.sleep(PAUSE)
    return well


async def run(rounds: int) -> int:
    """Disturb a cluster under load `rounds` times; return the exit code of the program."""
    with tempfile.TemporaryDirectory() as directory:
        async with RunningCluster(Path(directory), 2, 1, routers=2, movable=1) as cluster:
            load = Load(cluster.url)
            async with Client(cluster.url) as client:
                for prompt in range(len(PROMPTS)):
                    for tokens in TOKENS:
                        load.expected[prompt, tokens] = await streamed(client, prompt, tokens)
            clients = [asyncio.create_task(load.client(number)) for number in range(CLIENTS)]
            well = await disturb(cluster, load, rounds)
            load.over = True
            await asyncio.wait_for(asyncio.gather(*clients), PATIENCE)
            for name in cluster.router_names:
                async with cluster.at(name) as client:
                    await client.wait_idle()
    print(json.dumps({**load.counts, "problems": load.problems}), flush=True)
    return int(not well or load.counts["failed"] > 0 or load.counts["wrong"] > 0)


if __name__ == "__main__":
    sys.exit(asyncio.run(run(int(sys.argv[1]) if len(sys.argv) > 1 else 1)))
