"""A cluster with TLS and API keys, as docs/security.md describes: who gets in, and who can see what."""

from __future__ import annotations

import asyncio
import hashlib
import signal
import ssl
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from tests.cluster.harness import Client, RunningCluster
from tests.fakes.tls_files import AUTHORITY, copy_certificates
from tests.fakes.waiting import PATIENCE

PROMPT = list(range(50, 90))


class Keyed(RunningCluster):
    """A cluster with API keys; `client` returns a client with the key of that name."""

    def client(self, name: str | None) -> Client:
        tls = ssl.create_default_context(cafile=AUTHORITY)
        url = self.url.replace("http:", "https:")
        return Client(url, key=None if name is None else f"secret of {name}", tls=tls)

    def write_keys(self, *names: str) -> None:
        """Replace the file atomically, as deploy/api_key does."""
        rows = [
            f"- {{id: {name}, sha256: {hashlib.sha256(f'secret of {name}'.encode()).hexdigest()!r}}}"
            for name in names
        ]
        new = self.directory / "keys.new"
        new.write_text("\n".join(rows))
        new.chmod(0o600)
        new.replace(self.directory / "keys.yaml")


@pytest.fixture
async def keyed(tmp_path: Path) -> AsyncIterator[Keyed]:
    cert, key = copy_certificates(tmp_path)
    config = {
        "router": {"tls": {"cert": str(cert), "key": str(key)}},
        "security": {"api_keys": "keys.yaml"},
    }
    cluster = Keyed(tmp_path, config=config)
    cluster.write_keys("team-a", "team-b")
    async with cluster:
        yield cluster


async def status(cluster: Keyed, name: str | None) -> int:
    async with cluster.client(name) as client:
        async with client.session.get("/v1/models") as response:
            return response.status


async def test_tls_keys_tenants_and_rotation(keyed: Keyed) -> None:
    async with Client(keyed.url) as plain:
        with pytest.raises(aiohttp.ClientError):
            await plain.info()
    assert [await status(keyed, name) for name in (None, "nobody", "team-a")] == [401, 401, 200]
    await check_tenants(keyed)
    await check_views(keyed)
    await check_rotation(keyed)


async def check_tenants(keyed: Keyed) -> None:
    """Tenants get the same answer but do not share the cache."""
    cached: dict[str, list[int]] = {"team-a": [], "team-b": []}
    texts = set()
    for name in ("team-a", "team-b", "team-a", "team-b"):
        async with keyed.client(name) as client:
            answer = await client.complete(PROMPT)
            texts.add(answer.text)
            cached[name].append(answer.usage["prompt_tokens_details"]["cached_tokens"])
            own = await client.complete(PROMPT, cache_salt=f"{name} {len(cached[name])}")
            assert own.usage["prompt_tokens_details"]["cached_tokens"] == 0
            texts.add(own.text)
    assert len(texts) == 1
    for first, second in cached.values():
        assert first == 0
        assert second >= len(PROMPT) - 16 - 1


async def check_views(keyed: Keyed) -> None:
    assert stat.S_IMODE(keyed.admin_socket.stat().st_mode) == 0o600
    assert keyed.listens_at("router") == {("127.0.0.1", keyed.port)}
    async with keyed.operator() as operator:
        info = await operator.info()
        secrets = [info["incarnation"], *(node["incarnation"] for node in info["nodes"])]
        assert {node["pid"] for node in info["nodes"]} == {
            keyed.processes[name].pid for name in ("prefill-0", "decode-0")
        }
        await operator.wait_idle()
    async with keyed.client("team-a") as client:
        async with client.session.get("/server_info") as response:
            said = await response.text()
        assert '"served_model_name":"tiny"' in said
        for hidden in (*secrets, "prefill-0", str(keyed.directory), '"pid"', '"host"'):
            assert hidden not in said
        async with client.session.get("/metrics") as response:
            assert response.status == 403
    assert "team-a" in keyed.log("router")
    assert "secret of" not in keyed.log("router")


async def check_rotation(keyed: Keyed) -> None:
    """Without a restart, under load: a new key is accepted, a removed one is not; SIGHUP reloads the certificate.

    Requests that run already finish, those of the removed key too.
    """
    async with keyed.client("team-a") as revoked, keyed.client("team-b") as kept:
        running = [
            asyncio.create_task(client.complete(PROMPT, 500)) for client in (revoked, kept) for _ in range(2)
        ]
        async with keyed.operator() as operator:
            async with asyncio.timeout(PATIENCE):
                while (await operator.node("decode-0"))["load"]["running"] < len(running):
                    await asyncio.sleep(0.02)
        keyed.write_keys("team-b", "team-c")
        async with asyncio.timeout(PATIENCE):
            while [await status(keyed, name) for name in ("team-a", "team-b", "team-c")] != [401, 200, 200]:
                await asyncio.sleep(0.1)
        with pytest.raises(RuntimeError, match="^401"):
            await revoked.complete(PROMPT)
        assert len({answer.text for answer in await asyncio.gather(*running)}) == 1
    keyed.processes["router"].send_signal(signal.SIGHUP)
    async with asyncio.timeout(PATIENCE):
        while "read the TLS files again" not in keyed.log("router"):
            await asyncio.sleep(0.1)
    assert await status(keyed, "team-b") == 200
