"""overlays/movable with its components as processes on this machine: they serve, change a role, publish and drain.

    TANDEM_PODS=1 python -m pytest -s tests/kubernetes

It is not part of the usual tests: it needs root, and takes half a minute.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.fakes.waiting import until
from tests.kubernetes.pods import ROOT, USER, Pods
from tests.unit.manifests.kustomize import Manifest, build

pytestmark = pytest.mark.skipif(os.environ.get("TANDEM_PODS") != "1", reason="set TANDEM_PODS=1")

PLACE = ROOT / "deploy/kubernetes"
PORT = 18_777
ROUTER = "127.0.0.10"
NODES = {"prefill-0": "prefill", "decode-0": "decode", "flex-0": "flex", "flex-1": "flex"}
# What this machine lacks: the volume of models, GPUs, NIXL.
CHANGES = {
    "/models/model": str(ROOT / "deploy/tiny_models/tiny-target"),
    "  dtype: bfloat16\n": "",
    'device: "cuda:0", ': "",
    "  nixl_devices: eth0\n": "",
    "transport: nixl": "transport: tcp",
    "port: 8000": f"port: {PORT}",
}
BODY = {"model": "model", "prompt": "one two three " * 40, "max_tokens": 8, "temperature": 0}


@pytest.fixture
def folder() -> Iterator[Path]:
    """The user of the pods has to get into it."""
    made = Path(tempfile.mkdtemp(prefix="tandem-pods-", dir="/tmp"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


def manifests(folder: Path) -> list[Manifest]:
    plan = {
        "namespace": "tandem",
        "resources": [str(PLACE / "overlays/movable")],
        "components": [str(PLACE / "components/planner-roles"), str(PLACE / "components/kv-events")],
    }
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(plan))
    return build(folder)


def write_files(folder: Path, built: list[Manifest]) -> str:
    """Write ConfigMaps and Secrets as the commands of docs/kubernetes.md make them, and return an API key."""
    for name in ("etc", "secrets"):
        (folder / name).mkdir()
    for each in built:
        for name, text in each["data"].items() if each["kind"] == "ConfigMap" else ():
            for old, new in CHANGES.items():
                assert name != "cluster.yaml" or old in text
                text = text.replace(old, new)
            (folder / "etc" / name).write_text(text)
    secrets = folder / "secrets"
    subprocess.run(["deploy/keygen", secrets, folder / "etc/cluster.yaml"], cwd=ROOT, check=True)
    said = subprocess.run(
        ["deploy/api_key", "team-a", secrets / "api_keys.yaml"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    for file in secrets.iterdir():
        os.chown(file, 0, int(USER))
        file.chmod(0o440)
    secrets.chmod(0o755)
    key = re.search(r"^[A-Za-z0-9_-]{40,}$", said, re.MULTILINE)
    assert key is not None
    return key[0]


def ask(path: str, key: str, body: Any = None) -> Any:
    """Return the JSON of an answer; None if there is none or its status is an error."""
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://{ROUTER}:{PORT}{path}", data, headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)
    except (urllib.error.URLError, OSError):
        return None


def admin(pods: Pods, path: str, *options: str) -> str:
    socket = pods.volume("tandem-router", "run") / "own/router.admin.sock"
    words = ["curl", "-s", "--unix-socket", str(socket), *options, f"http://localhost{path}"]
    return subprocess.run(words, check=True, capture_output=True, text=True, timeout=60).stdout


def test_pods_serve_change_a_role_and_drain(folder: Path) -> None:
    built = manifests(folder)
    key = write_files(folder, built)
    sets = {
        each["metadata"]["name"]: each["spec"]["template"]
        for each in built
        if each["kind"] in ("Deployment", "StatefulSet")
    }
    with Pods(folder, {"tandem-router": ROUTER}) as pods:
        pods.start("tandem-router", sets["tandem-router"], ROUTER)
        for number, (pod, name) in enumerate(NODES.items(), 11):
            pods.start(pod, sets[name], f"127.0.0.{number}")
        until(lambda: all((pods.volume(pod, "run") / f"own/{pod}.ready").exists() for pod in NODES))
        until(lambda: ask("/ready", key) == {"status": "ready"})
        text = ask("/v1/completions", key, BODY)["choices"][0]["text"]

        changed = json.loads(admin(pods, "/workers/flex-0/role", "--json", '{"role": "prefill"}'))
        assert (changed["name"], changed["role"]) == ("flex-0", "prefill")
        assert ask("/v1/completions", key, BODY)["choices"][0]["text"] == text
        # Both halves of a movable node publish.
        until(lambda: "tandem_placement_followed_nodes 6.0" in admin(pods, "/metrics"))
        until(lambda: "observations since" in pods.log("tandem-router", "planner").read_text())
        assert pods.drain() == dict.fromkeys(["tandem-router", *NODES], 0)
