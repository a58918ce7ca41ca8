"""Who may be a node of a real cluster: processes that hold the key of their own name, and nobody else."""

from __future__ import annotations

import stat
from pathlib import Path

from tests.cluster.conftest import OUTPUT_TOKENS, Reference
from tests.cluster.harness import Client, RunningCluster, hold_port


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
