"""A placement policy is added by a function and a row: the cluster file takes its name, and the router makes it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from common.config import load_cluster
from common.errors import ConfigError
from common.placements import PLACEMENTS
from router.nodes.placement import Candidate, LeastLoaded, make_policy, prefill_cost
from tests.unit.router.nodes.test_placement import candidate


def most_free_pages(cost: Callable[[Candidate], float]) -> LeastLoaded:
    """The policy that docs/extending.md describes."""
    return LeastLoaded(lambda each: -each.load.free_pages)


def cluster_file(tmp_path: Path) -> Path:
    file = tmp_path / "cluster.yaml"
    nodes = "prefill: {nodes: [{name: p}]}\ndecode: {nodes: [{name: d}]}\n"
    file.write_text("model: {path: m}\nrouter: {placement: {decode: most_free_pages}}\n" + nodes)
    return file


def test_without_its_row_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"router\.placement\.decode.*round_robin, least_loaded"):
        load_cluster(cluster_file(tmp_path), environ={})


def test_a_row_is_all_that_it_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = "tests.unit.router.nodes.test_added_policy:most_free_pages"
    monkeypatch.setitem(PLACEMENTS, "most_free_pages", row)
    name = load_cluster(cluster_file(tmp_path), environ={}).cluster.router.placement.decode
    policy = make_policy(name, prefill_cost)
    nodes = [candidate("full", free_pages=1), candidate("empty", free_pages=9)]
    assert policy.choose(nodes).name == "empty"
