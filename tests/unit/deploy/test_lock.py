"""requirements.lock holds what pyproject.toml asks for, each file by its SHA-256 sum; torch comes apart."""

from __future__ import annotations

import re
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.architecture.source_tree import ROOT

APART = {"torch"}  # deploy/setup says why


def pins() -> list[tuple[Requirement, list[str]]]:
    """(name==version with its marker, hashes) of each entry."""
    text = (ROOT / "requirements.lock").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [
        (
            Requirement(re.sub(r"--hash=\S+", "", line).strip()),
            re.findall(r"--hash=sha256:([0-9a-f]{64})\b", line),
        )
        for line in lines
    ]


def wanted() -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    names = [*project["project"]["dependencies"], *extras["dev"], *project["build-system"]["requires"]]
    return [Requirement(each) for each in names]


@pytest.mark.parametrize("python", ["3.11", "3.12"])
def test_every_requirement_is_pinned_to_a_version_that_fits(python: str) -> None:
    environment = {"python_version": python, "python_full_version": f"{python}.0"}
    found = {
        canonicalize_name(pin.name): next(iter(pin.specifier)).version
        for pin, _ in pins()
        if pin.marker is None or pin.marker.evaluate(environment)
    }
    missing = [
        str(each)
        for each in wanted()
        if each.name not in APART
        and (each.marker is None or each.marker.evaluate(environment))
        and not each.specifier.contains(
            found.get(canonicalize_name(each.name), "0.0.dev0"), prereleases=False
        )
    ]
    assert not missing, f"run deploy/lock: not in requirements.lock, or in another version: {missing}"


def test_every_pin_has_hashes_and_torch_is_not_among_them() -> None:
    assert [str(pin) for pin, hashes in pins() if not hashes] == []
    assert len(pins()) > 60
    kept_out = re.compile(r"torch|nvidia-.*|cuda-.*")
    assert [pin.name for pin, _ in pins() if kept_out.fullmatch(pin.name)] == []
