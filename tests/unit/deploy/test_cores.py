"""How many cores a machine, or a container on it, has for the nodes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from deploy.cores import usable_cores


@pytest.fixture(autouse=True)
def cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))


@pytest.mark.parametrize(
    ("quotas", "expected"),
    [
        ({}, 64),
        ({"a/b": "max 100000", "a": "max 100000"}, 64),
        ({"a/b": "450000 100000"}, 4),
        ({"a/b": "max 100000", "a": "800000 100000", "": "1600000 100000"}, 8),
        ({"a/b": "20000 100000"}, 1),
        ({"a/b": "9900000 100000"}, 64),
        ({"a/b": "nonsense"}, 64),
    ],
)
def test_the_lowest_limit_of_its_control_groups_counts(
    tmp_path: Path, quotas: dict[str, str], expected: int
) -> None:
    for group, quota in quotas.items():
        (tmp_path / group).mkdir(parents=True, exist_ok=True)
        (tmp_path / group / "cpu.max").write_text(f"{quota}\n")
    own = tmp_path / "cgroup"
    own.write_text("1:cpu:/other\n0::/a/b\n")
    assert usable_cores(own, tmp_path) == expected


def test_without_control_groups_it_is_the_affinity(tmp_path: Path) -> None:
    assert usable_cores(tmp_path / "none", tmp_path) == 64
