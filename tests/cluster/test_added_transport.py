"""A transport that is added only by its record serves a real cluster: tests/fakes/file_transport."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.config import load_cluster, transports
from common.config.transport_choice import choose_transport
from common.errors import ConfigError
from tests.cluster.conftest import OUTPUT_TOKENS, Reference
from tests.cluster.harness import Client, RunningCluster
from tests.cluster.test_exactness import differences

TABLE, RECORD = "common.config.transports:TRANSPORTS", "tests.fakes.file_transport.kind:KIND"

pytestmark = pytest.mark.timeout(900)  # two busy cores


@pytest.mark.parametrize("layers", [False, True])
async def test_exact_tokens_through_files(
    prompts: list[list[int]], reference: Reference, tmp_path: Path, layers: bool
) -> None:
    """The transport's own config key names the directory of its files, which are removed afterwards."""
    files = tmp_path / "files"
    files.mkdir()
    transfer = {"transport": "files", "file_directory": str(files), "layers": layers}
    chosen = prompts[::8]
    config = {"transfer": transfer, "prefill": {"chunk_tokens": 64}}
    async with RunningCluster(tmp_path, config=config, rows=((TABLE, f"files={RECORD}"),)) as cluster:
        async with Client(cluster.url) as client:
            answers = await client.complete_all(chosen, 8, OUTPUT_TOKENS)
            assert not differences(chosen, answers, reference, OUTPUT_TOKENS)
            await client.wait_idle()
            info = await client.info()
            assert {node["config"]["transport"] for node in info["nodes"]} == {"files"}
            (decode,) = (node for node in info["nodes"] if node["role"] == "decode")
            assert decode["counters"]["requests"] == len(chosen)
        assert sorted(path.suffix for path in files.iterdir()) == [".kv", ".records"]
    assert not list(files.iterdir())


def test_the_config_knows_it_by_its_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text("model: {path: m}\ntransfer: {transport: files, file_directory: /x}\n")
    with pytest.raises(ConfigError, match=r"transfer\.file_directory: unknown key"):
        load_cluster(file, environ={})
    monkeypatch.setitem(transports.TRANSPORTS, "files", RECORD)
    cluster = load_cluster(file, environ={}).cluster
    kind = choose_transport(cluster)
    assert (kind.name, kind.read(cluster.transfer).file_directory) == ("files", "/x")
    with pytest.raises(
        ConfigError, match=r"file_directory: /x would have no effect: this cluster's transport is tcp"
    ):
        load_cluster(file, ["transfer.transport=tcp"], {})
    with pytest.raises(ConfigError, match=r"file_directory: Expected `str`, got `int`"):
        load_cluster(file, ["transfer.file_directory=3"], {})
