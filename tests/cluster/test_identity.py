"""Who may be a node of a real cluster: only processes that hold the key of their own name."""

from __future__ import annotations

import asyncio
import json
import resource
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import msgspec
import pytest

from common.checkpoint.model_config import model_fingerprint
from common.ipc import Dealer, LinkSecurity
from common.ipc.curve import Curve
from common.messages import prefill_inbox
from common.messages.generation import OutputToken
from common.messages.identity import NodeRef, Role
from common.messages.node_inbox import Rejected
from common.messages.protocol import CONTROL_PROTOCOL_VERSION
from common.messages.router_inbox import FirstToken, Goodbye, Register, TokenRun, Tokens
from common.messages.wire import encode
from common.process import EXIT_REFUSED
from tests.cluster.conftest import OUTPUT_TOKENS, Reference
from tests.cluster.harness import MODEL, Client, RunningCluster, hold_port
from tests.fakes.held_context import Context
from tests.fakes.keyless import Keyless
from tests.fakes.waiting import PATIENCE, eventually

pytestmark = pytest.mark.timeout(900)  # two busy cores


FLOOD = 2000  # connections


@pytest.fixture(scope="module")
def tcp_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    """One prefill and two decode nodes over TCP without configured keys. The tests of this file share it, in order."""
    with ExitStack() as stack:
        bulk = [int(stack.enter_context(hold_port()).getsockname()[1]) for _ in range(2)]
        config = {
            "transfer": {"transport": "tcp"},
            "decode": {
                "nodes": [{"name": f"decode-{i}", "bulk_port": port} for i, port in enumerate(bulk)],
            },
            "health": {"node_timeout": 10.0, "router_timeout": 10.0},
        }
        directory = tmp_path_factory.mktemp("tcp")
        cluster = stack.enter_context(RunningCluster(directory, 1, 2, config))
        cluster.addresses.update({f"decode-{i}": port for i, port in enumerate(bulk)})
        yield cluster


async def test_a_cluster_on_loopback_tcp_makes_keys_of_its_own(tcp_cluster: RunningCluster) -> None:
    """Without configured keys every process still authenticates peers, and listens only on its own addresses."""
    cluster = tcp_cluster
    expected = {name: {("127.0.0.1", port)} for name, port in cluster.addresses.items()}
    expected["router"].add(("127.0.0.1", cluster.port))
    assert {name: cluster.listens_at(name) for name in cluster.names} == expected
    keys = cluster.run_dir / "keys"
    assert stat.S_IMODE(keys.stat().st_mode) == 0o700
    assert {file.name for file in keys.glob("*.key_secret")} == {
        f"{name}.key_secret" for name in cluster.names
    }
    assert {stat.S_IMODE(file.stat().st_mode) for file in keys.glob("*.key_secret")} == {0o600}


def descriptors(cluster: RunningCluster, name: str) -> int:
    return len(list(Path(f"/proc/{cluster.processes[name].pid}/fd").iterdir()))


def holds_at_most(cluster: RunningCluster, name: str, count: int) -> bool:
    return descriptors(cluster, name) <= count


def closed_by_peer(connection: socket.socket) -> bool:
    """Read what has arrived; return True at the end of the stream."""
    try:
        while connection.recv(4096):
            pass
    except BlockingIOError:
        return False
    except ConnectionError:
        pass
    return True


async def test_half_open_connections_stop_no_service(
    tcp_cluster: RunningCluster, prompts: list[list[int]], reference: Reference
) -> None:
    """A flood to the control ports of the router and a prefill node is closed, and its descriptors are freed."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    count = FLOOD if hard == resource.RLIM_INFINITY else min(FLOOD, (hard - 500) // 2)
    chosen = prompts[::10]
    async with Client(tcp_cluster.url) as client:
        await client.complete(chosen[0], 1)
        before = {name: descriptors(tcp_cluster, name) for name in ("router", "prefill-0")}
        with ExitStack() as stack:
            strangers = []
            for name in before:
                where = ("127.0.0.1", tcp_cluster.addresses[name])
                strangers += [
                    stack.enter_context(socket.create_connection(where, PATIENCE)) for _ in range(count)
                ]
            answers = await client.complete_all(chosen, 4, OUTPUT_TOKENS)
            assert [answer.tokens for answer in answers] == [
                reference(prompt, OUTPUT_TOKENS) for prompt in chosen
            ]
            for each in strangers:
                each.setblocking(False)
            await eventually(lambda: all(closed_by_peer(each) for each in strangers))
        # Up to 20 more: connections of clients, and files that are open for a moment.
        for name, number in before.items():
            await eventually(partial(holds_at_most, tcp_cluster, name, number + 20))
    assert not [
        line for name in before for line in tcp_cluster.log(name).splitlines() if '"node lost"' in line
    ]


class Impostor:
    """A process of its own that tries to be a node: with a key pair or none, and a routing id."""

    def __init__(self, cluster: RunningCluster, server: str, key: str, identity: str) -> None:
        self._context = Context()
        self.security: LinkSecurity = Keyless()
        if key:
            self.security = Curve(self._context, cluster.run_dir / "keys", key, ())
        address = f"tcp://127.0.0.1:{cluster.addresses[server]}"
        self.dealer = Dealer(self._context, address, identity.encode(), server, self.security)

    def say(self, *messages: msgspec.Struct) -> None:
        for message in messages:
            self.dealer.send(encode(message))

    def heard(self) -> list[msgspec.Struct]:
        return [prefill_inbox.codec.decode(frame) for frame in self.dealer.drain()]

    def close(self) -> None:
        self.security.close()
        self._context.destroy(linger=0)


def forged(name: str, role: Role, incarnation: str) -> Register:
    """A registration that would route every prompt to the forger and end all requests longer than a token."""
    return Register(
        protocol_version=CONTROL_PROTOCOL_VERSION,
        node=NodeRef(name=name, role=role, incarnation=incarnation, peer_address="tcp://127.0.0.1:9"),
        host="forger",
        pid=1,
        model_fingerprint=model_fingerprint(MODEL),
        max_model_len=1,
        page_size=16,
        total_pages=10**6,
        effective_config={},
    )


async def test_nobody_without_the_key_of_its_name_is_a_node(
    tcp_cluster: RunningCluster, prompts: list[list[int]], reference: Reference
) -> None:
    """Impostors with no key, another node's key, a key of another role or an old incarnation learn and change nothing.

    The node whose key they use is cut off and ends; started again, it serves.
    """
    cluster = tcp_cluster
    async with Client(cluster.url) as client:
        before = await client.info()
        old = "a" * 32
        impostors = {
            "no key": Impostor(cluster, "router", "", f"prefill-0/{old}"),
            "another name": Impostor(cluster, "router", "decode-1", f"prefill-0/{old}"),
            "not in the file": Impostor(cluster, "router", "decode-1", f"prefill-9/{old}"),
            "another role": Impostor(cluster, "router", "decode-1", f"decode-1/{old}"),
            "an old incarnation": Impostor(cluster, "router", "prefill-0", f"prefill-0/{old}/old"),
            "no key, to a peer": Impostor(cluster, "prefill-0", "", f"decode-0/{old}"),
            "no decode node": Impostor(cluster, "prefill-0", "router", f"decode-0/{old}"),
            "itself": Impostor(cluster, "prefill-0", "prefill-0", f"prefill-0/{old}"),
        }
        chosen = prompts[::5]
        answering = asyncio.create_task(client.complete_all(chosen, 8, OUTPUT_TOKENS))
        heard: dict[str, list[msgspec.Struct]] = {case: [] for case in impostors}
        misused = cluster.processes["decode-1"]
        deadline = time.monotonic() + 4 * PATIENCE
        while not answering.done() or misused.poll() is None:
            assert time.monotonic() < deadline, (answering, misused.returncode)
            for case, impostor in impostors.items():
                name = "decode-1" if case == "another role" else "prefill-0"
                impostor.say(
                    *([] if case == "an old incarnation" else [forged(name, "prefill", old)]),
                    FirstToken(room=1, token=OutputToken(9), finish_reason="stop", cached_tokens=0),
                    Tokens(runs=[TokenRun(1, 0, [OutputToken(9)], "stop")]),
                    Goodbye(incarnation=old),
                )
                heard[case] += impostor.heard()
            await asyncio.sleep(0.25)
        answers = await answering
        for impostor in impostors.values():
            impostor.close()
        assert [answer.tokens for answer in answers] == [
            reference(prompt, OUTPUT_TOKENS) for prompt in chosen
        ]
        refusals = heard.pop("another role")
        assert refusals
        assert all(isinstance(each, Rejected) and "decode node" in each.reason for each in refusals)
        assert not any(heard.values())
        after = await client.info()
        assert after["refused_messages"] > 0
        assert after["max_model_len"] == before["max_model_len"]
        lost = [json.loads(line) for line in cluster.log("router").splitlines() if '"node lost"' in line]
        assert {line["peer"] for line in lost} == {"decode-1"}, "only the node whose key was misused is lost"
        cluster.launch("decode-1")
        await cluster.wait_nodes()


async def test_a_node_whose_key_is_revoked_is_lost_and_costs_no_answer(
    tcp_cluster: RunningCluster, prompts: list[list[int]], reference: Reference
) -> None:
    """When its public key is removed under load, its requests continue on the other node; with the key it returns."""
    key = tcp_cluster.run_dir / "keys" / "decode-1.key"
    chosen = [prompt for prompt in prompts if len(prompt) < 200][:16]
    async with Client(tcp_cluster.url) as client:
        running = [asyncio.create_task(client.complete(prompt, 60)) for prompt in chosen]
        await asyncio.sleep(0.3)
        kept = key.read_bytes()
        key.unlink()
        await client.gone("decode-1")  # none of its messages count any more, heartbeats included
        running += [asyncio.create_task(client.complete(prompt, 60)) for prompt in chosen]
        for prompt, task in zip(2 * chosen, running, strict=True):
            answer = await task
            assert answer.tokens == reference(prompt, 60, answer.tokens)
        key.write_bytes(kept)
        await tcp_cluster.wait_nodes()
        await client.wait_idle()


async def test_a_second_process_under_a_name_ends_and_the_first_serves_on(
    tmp_path: Path, prompts: list[list[int]], reference: Reference
) -> None:
    """It says why, no request fails meanwhile, and a third one takes over once the first is dead."""
    async with RunningCluster(tmp_path, 1, 1) as cluster, Client(cluster.url) as client:
        first = cluster.processes["decode-0"]
        cluster.launch("decode-0")
        second = cluster.processes.pop("decode-0")
        cluster.processes["decode-0"] = first
        asked = 0
        while second.poll() is None:
            prompt = prompts[asked % len(prompts)]
            answer = await client.complete(prompt, OUTPUT_TOKENS)
            assert answer.tokens == reference(prompt, OUTPUT_TOKENS)
            asked += 1
        assert asked > 0
        assert second.poll() == EXIT_REFUSED
        # The first one writes to the same log.
        lines = [json.loads(line) for line in cluster.log("decode-0").splitlines()]
        (said,) = [line for line in lines if line["event"] == "no router takes this node: it ends"]
        assert said["reason"].startswith("decode-0 is already running as process")
        assert first.poll() is None
        cluster.kill("decode-0")
        cluster.launch("decode-0")
        await cluster.wait_nodes()
        answer = await client.complete(prompts[0], OUTPUT_TOKENS)
        assert answer.tokens == reference(prompts[0], OUTPUT_TOKENS)
