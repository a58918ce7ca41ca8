"""The files of the container image agree with each other, with the manifests and with what a process needs.

No container engine runs here: deploy/container/rehearse runs the steps of the image in a clean root, and
docs/kubernetes.md says what it showed.
"""

from __future__ import annotations

import re
import shlex
from fnmatch import fnmatch
from pathlib import Path

import pytest
import yaml

from deploy.container.unneeded import required
from tests.architecture.source_tree import ROOT

CONTAINER = ROOT / "deploy" / "container"
NODES = ROOT / "deploy" / "kubernetes" / "nodes"


def steps() -> list[tuple[str, str]]:
    """Return (instruction, arguments) of the Dockerfile, with continued lines joined."""
    text = re.sub(r"\\\n\s*", " ", (CONTAINER / "Dockerfile").read_text())
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(line.partition(" ")[0], line.partition(" ")[2]) for line in lines]


def environment() -> dict[str, str]:
    words = [word for name, rest in steps() if name == "ENV" for word in shlex.split(rest)]
    return dict(word.split("=", 1) for word in words)


def reaches_the_image(path: str) -> bool:
    """Apply .dockerignore as a container engine does: the last pattern that matches decides."""
    included = True
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        pattern = line.removeprefix("!")
        parts = [path, *(str(parent) for parent in Path(path).parents)]
        bare = pattern.removeprefix("**/")
        if any(fnmatch(each, pattern) or fnmatch(each, bare) for each in parts):
            included = line.startswith("!")
    return included


@pytest.mark.parametrize(
    "path",
    [
        "common/node_names.py",
        "deploy/launch_router",
        "deploy/container/install-packages",
        "deploy/tiny_models/tiny-target/config.json",
        "pyproject.toml",
        "requirements.lock",
        "README.md",
        "LICENSE",
    ],
)
def test_what_runs_reaches_the_image(path: str) -> None:
    assert (ROOT / path).exists()
    assert reaches_the_image(path)


@pytest.mark.parametrize(
    "path",
    [
        ".git/config",
        ".venv/bin/python",
        "tests/conftest.py",
        "docs/api.md",
        "deploy/__pycache__/cli.cpython-312.pyc",
        "deploy/keys/router.key_secret",
        "deploy/clusters/decode-ANY.key_secret",
        "deploy/kubernetes/base/cluster.yaml",
    ],
)
def test_neither_secrets_nor_history_nor_tests_reach_the_image(path: str) -> None:
    assert not reaches_the_image(path)


def test_scripts_of_the_image_can_be_run() -> None:
    for name, rest in steps():
        for script in re.findall(r"install-\w+", rest):
            assert (CONTAINER / script).stat().st_mode & 0o111, (name, script)


def test_packages_come_by_hash() -> None:
    """deploy/setup installs the lock with --require-hashes; nothing else installs packages."""
    assert "deploy/setup" in (CONTAINER / "install-packages").read_text()
    assert "--require-hashes" in (ROOT / "deploy" / "setup").read_text()
    assert not [rest for name, rest in steps() if name == "RUN" and "pip" in rest]


def test_the_user_is_that_of_the_manifests() -> None:
    (user,) = [rest for name, rest in steps() if name == "USER"]
    uid, gid = user.split(":")
    assert f"--uid {uid} --gid {gid}" in (CONTAINER / "install-system").read_text()
    manifest = next(yaml.safe_load_all((NODES / "decode.yaml").read_text()))
    security = manifest["spec"]["template"]["spec"]["securityContext"]
    assert (str(security["runAsUser"]), str(security["runAsGroup"])) == (uid, gid)


def test_caches_are_where_a_pod_can_write() -> None:
    manifest = next(yaml.safe_load_all((NODES / "decode.yaml").read_text()))
    (container,) = manifest["spec"]["template"]["spec"]["containers"]
    writable = [each["mountPath"] for each in container["volumeMounts"] if not each.get("readOnly")]
    values = environment()
    for name in ("HOME", "XDG_CACHE_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
        assert any(Path(values[name]).is_relative_to(each) for each in writable), name
    assert ("VOLUME", "/cache") in steps()


def test_the_entry_is_what_the_manifests_expect() -> None:
    """Their arguments name a script of deploy/ relative to the working directory, after tini."""
    assert ("WORKDIR", "/opt/tandem") in steps()
    assert ("ENTRYPOINT", '["/usr/bin/tini", "--"]') in steps()
    assert "tini" in (CONTAINER / "install-system").read_text()
    assert environment()["TANDEM_PYTHON"] == "/opt/tandem/.venv/bin/python"


def test_a_compiler_stays_for_kernels() -> None:
    """Triton compiles the loader of its kernels where it first runs one."""
    words = (CONTAINER / "install-system").read_text().split()
    assert {"gcc", "python3-dev", "libc6-dev"} <= set(words)


def test_what_serves_is_needed_and_what_tests_is_not() -> None:
    wanted = set(required("tandem-serving"))
    assert {"aiohttp", "pyzmq", "torch", "llguidance", "nixl-cu13"} <= wanted
    assert not {"pytest", "mypy", "ruff", "schemathesis", "hypothesis"} & wanted
