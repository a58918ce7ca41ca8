"""Processes whose logs cannot be written (fault 28 of docs/faults.md) continue to serve."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.harness import Client, RunningCluster

pytestmark = pytest.mark.timeout(900)


class WithoutLogs(RunningCluster):
    """A cluster in which every write to stdout and stderr fails with ENOSPC."""

    def launch(self, name: str) -> None:
        log = self.directory / f"{name}.log"
        log.unlink(missing_ok=True)
        log.symlink_to("/dev/full")
        super().launch(name)

    def log(self, name: str) -> str:
        return "(a full disk)"  # reading /dev/full never ends


async def test_a_full_disk_under_the_logs_disturbs_nothing(tmp_path: Path) -> None:
    """Requests are answered, a node that dies comes back, and draining ends with exit code 0."""
    async with WithoutLogs(tmp_path) as cluster, Client(cluster.url) as client:
        first = await client.complete([5, 6, 7], 8)
        cluster.kill("decode-0")
        await client.gone("decode-0")
        cluster.launch("decode-0")
        await cluster.wait_nodes()
        assert (await client.complete([5, 6, 7], 8)).tokens == first.tokens
        await client.wait_idle()
    assert {name: process.returncode for name, process in cluster.processes.items()} == {
        "router": 0,
        "prefill-0": 0,
        "decode-0": 0,
    }
