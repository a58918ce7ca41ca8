"""`tests.bench.baseline` serves each cluster file with the nodes and ranks of that file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from common.config.load import load_cluster
from tests.bench.baseline import cluster_files, cluster_of

FILES = cluster_files()
DEFAULT = {"prefill": "prefill-0", "decode": "decode-0"}


def ranks(sections: dict[str, Any], role: str) -> dict[str, int]:
    nodes = sections.get(role, {}).get("nodes", [{"name": DEFAULT[role]}])
    return {node["name"]: node.get("tensor_parallel", 1) for node in nodes}


@pytest.mark.parametrize("name", FILES)
def test_the_nodes_are_those_of_the_file(tmp_path: Path, name: str) -> None:
    cluster = cluster_of(tmp_path, FILES[name])
    for port in cluster.held:
        port.close()
    served = load_cluster(cluster.file).cluster
    for role, nodes in ("prefill", served.prefill.nodes), ("decode", served.decode.nodes):
        assert {node.name: node.tensor_parallel for node in nodes} == ranks(FILES[name], role)
    movable = FILES[name].get("movable", {}).get("nodes", [])
    assert [node.name for node in served.movable.nodes] == [node["name"] for node in movable]
    assert served.router.port == cluster.port
