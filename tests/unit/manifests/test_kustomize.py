"""The kustomize of kubectl makes of the manifests what our builder makes of them. Needs kubectl, but no cluster."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.unit.manifests.kustomize import Manifest, build, place

PLACE = Path(__file__).parents[3] / "deploy" / "kubernetes"
# The suffix that kustomize gives to the planner's ConfigMap.
SUFFIX = re.compile(r"(?<=tandem-planner)-[0-9a-z]{10}$", re.MULTILINE)


def unordered(node: Any) -> Any:
    """Sort lists: kustomize puts elements that a patch adds first, our builder last."""
    if isinstance(node, dict):
        return {key: unordered(value) for key, value in node.items()}
    if isinstance(node, list):
        return sorted(map(unordered, node), key=lambda each: json.dumps(each, sort_keys=True))
    return node


def by_place(manifests: list[Manifest]) -> dict[tuple[str, str], Manifest]:
    return {place(each): unordered(each) for each in manifests}


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="there is no kubectl")
@pytest.mark.parametrize(
    ("overlay", "components"),
    [
        ("1p1d", ()),
        ("2p2d", ("rdma", "kv-events", "endpointslices", "planner")),
        ("cpu", ()),
        ("disaggregated-set", ()),
        ("leader-worker-set", ()),
        ("movable", ("kv-events", "planner-roles")),
    ],
)
def test_kustomize_builds_the_same(overlay: str, components: tuple[str, ...], tmp_path: Path) -> None:
    folder = Path(os.path.relpath(PLACE, tmp_path))
    plan = {
        "resources": [str(folder / "overlays" / overlay)],
        "components": [str(folder / "components" / each) for each in components],
        "namespace": "tandem",
    }
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(plan))
    made = subprocess.run(
        ["kubectl", "kustomize", str(tmp_path)], capture_output=True, text=True, timeout=60, check=True
    )
    assert made.stderr == ""
    theirs = list(yaml.safe_load_all(SUFFIX.sub("", made.stdout)))
    assert by_place(theirs) == by_place(build(tmp_path))
