"""Who may be a node of a real cluster: processes that hold the key of their own name, and nobody else."""

from __future__ import annotations

import asyncio
import json
import stat
from pathlib import Path

import msgspec

from common.ipc import Dealer, LinkSecurity
from common.ipc.curve import Curve
from common.messages import prefill_inbox
from common.messages.generation import OutputToken
from common.messages.identity import NodeRef, Role
from common.messages.node_inbox import Rejected
from common.messages.router_inbox import FirstToken, Goodbye, Register, TokenRun, Tokens
from common.messages.wire import encode
from common.model_config import model_fingerprint
from tests.cluster.conftest import OUTPUT_TOKENS, Reference
from tests.cluster.harness import MODEL, Client, RunningCluster, hold_port
from tests.fakes.held_context import Context
from tests.fakes.keyless import Keyless


async def test_a_cluster_on_loopback_tcp_makes_keys_of_its_own(
    tmp_path: Path, prompts: list[list[int]], reference: Reference
) -> None:
    """No keys are configured. Every process listens on its configured addresses only (SECURITY.md, 3)."""
    with hold_port() as held:
        bulk = int(held.getsockname()[1])
        config = {
            "transfer": {"transport": "tcp"},
            "decode": {"nodes": [{"name": "decode-0", "bulk_port": bulk}]},
        }
        async with RunningCluster(tmp_path, 1, 1, config) as cluster:
            control, peers = cluster.addresses["router"], cluster.addresses["prefill-0"]
            assert {name: cluster.listens_at(name) for name in cluster.names} == {
                "router": {("127.0.0.1", cluster.port), ("127.0.0.1", control)},
                "prefill-0": {("127.0.0.1", peers)},
                "decode-0": {("127.0.0.1", bulk)},
            }
            keys = cluster.run_dir / "keys"
            assert stat.S_IMODE(keys.stat().st_mode) == 0o700
            assert {file.name for file in keys.glob("*.key_secret")} == {
                f"{name}.key_secret" for name in cluster.names
            }
            assert {stat.S_IMODE(file.stat().st_mode) for file in keys.glob("*.key_secret")} == {0o600}
            async with Client(cluster.url) as client:
                answer = await client.complete(prompts[40], OUTPUT_TOKENS)
                assert answer.tokens == reference(prompts[40], OUTPUT_TOKENS)


class Impostor:
    """A process of its own that wants to be a node: a key pair, or none, and a routing id."""

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
    """What would put every prompt into the forger's hands, and end all requests longer than a token."""
    return Register(
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
    tmp_path: Path, prompts: list[list[int]], reference: Reference
) -> None:
    """No key, another node's key, a key in another role, an old incarnation: they get nothing and change nothing."""
    async with RunningCluster(tmp_path, 1, 2, {"transfer": {"transport": "tcp"}}) as cluster:
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
            while not answering.done():
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
            assert {line["peer"] for line in lost} <= {"decode-1"}, "whose key was misused"
