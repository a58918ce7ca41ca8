"""model.manifest: files that differ from the list of checksums, or are not on it, are refused by name."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from common.checkpoint.model_manifest import check_manifests, read_manifest
from common.config.load import load_cluster
from common.config.router_processes import RouterProcess
from common.errors import ConfigError, ModelError
from common.observability.logs import Log
from common.observability.startup import StartupReporter
from decode_node import build as decode_build
from prefill_node import build as prefill_build
from router import build as router_build
from tests.architecture.source_tree import ROOT

MODELS = ROOT / "deploy" / "tiny_models"
CLUSTERS = ROOT / "deploy" / "clusters"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Return a model directory with a MANIFEST, written by the documented command."""
    path = Path(shutil.copytree(MODELS / "tiny-standalone", tmp_path / "model"))
    subprocess.run("sha256sum * > MANIFEST", shell=True, cwd=path, check=True)
    return path


def check(path: Path, weights: bool = True) -> None:
    check_manifests([(path, path / "MANIFEST")], weights)


def test_an_untouched_directory_passes_and_reports_every_byte(model: Path) -> None:
    seen: list[tuple[int, int]] = []
    check_manifests([(model, model / "MANIFEST")], True, lambda done, total: seen.append((done, total)))
    size = sum(each.stat().st_size for each in model.iterdir() if each.name != "MANIFEST")
    assert seen[-1] == (size, size)
    subprocess.run("sha256sum * > MANIFEST", shell=True, cwd=model, check=True)  # also lists the old manifest
    check(model)
    (model / ".gitattributes").write_text("x")
    (model / "folder").mkdir()
    check(model)


def test_the_manifest_may_lie_elsewhere(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "model.sha256"
    (model / "MANIFEST").rename(file)
    check_manifests([(model, file)], True)
    (model / "MANIFEST").write_text("x")
    with pytest.raises(ModelError, match=r"model/MANIFEST is not listed in .*model\.sha256"):
        check_manifests([(model, file)], True)


def change_weights(path: Path) -> None:
    with (path / "model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))


DAMAGES: list[tuple[Callable[[Path], object], str]] = [
    (change_weights, r"model\.safetensors has the SHA-256 sum [0-9a-f]{64}, .*MANIFEST lists [0-9a-f]{64}"),
    (lambda path: (path / "config.json").write_text("{}"), r"config\.json has the SHA-256 sum"),
    (lambda path: (path / "chat_template.json").write_text("{}"), r"chat_template\.json is not listed in"),
    (
        lambda path: (path / "config.json").unlink(),
        r"config\.json is listed in .*MANIFEST but does not exist",
    ),
]


@pytest.mark.parametrize(("damage", "said"), DAMAGES)
def test_what_differs_is_refused_by_name(damage: Callable[[Path], object], said: str, model: Path) -> None:
    damage(model)
    with pytest.raises(ModelError, match=said):
        check(model)


def test_the_router_leaves_the_sums_of_weights_to_the_nodes(model: Path) -> None:
    change_weights(model)
    check(model, weights=False)
    (model / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model\.safetensors is listed in"):
        check(model, weights=False)


SUM = "0" * 64


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "lists no files"),
        (f"{SUM}  ../config.json\n", "line 1: not a line of sha256sum"),
        (f"{SUM}  a\n{SUM}  /etc/passwd\n", "line 2: not a line of sha256sum"),
        (f"{SUM[1:]}  config.json\n", "line 1"),
        (f"{SUM}  a\n{SUM} *a\n", "line 2: 'a' is listed twice"),
        (f"\\{SUM}  a\\nb\n", "line 1"),
        ("\udcff", "not UTF-8"),
    ],
)
def test_malformed_manifests_are_refused(text: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "MANIFEST"
    file.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ModelError, match=said):
        read_manifest(file)


@pytest.mark.parametrize("process", ["router", "prefill-0", "decode-0"])
def test_every_process_checks_before_it_loads(process: str, model: Path) -> None:
    (model / "config.json").write_text("{}")
    overrides = [f"model.path={model}", f"model.manifest={model}/MANIFEST"]
    resolved = load_cluster(CLUSTERS / "local-plain.yaml", overrides, environ={})
    log = Log(process)
    node = prefill_build.build if process == "prefill-0" else decode_build.build
    start: Callable[[], object] = partial(node, resolved, process, StartupReporter(None, log), log)
    if process == "router":
        start = partial(router_build.build, resolved, RouterProcess(0, ()), log)
    with pytest.raises(ModelError, match=r"config\.json has the SHA-256 sum"):
        start()


def test_the_cluster_file_names_manifests_relative_to_itself() -> None:
    overrides = ["model.manifest=a/MANIFEST", "speculation.draft_manifest=/b"]
    resolved = load_cluster(CLUSTERS / "local-eagle3.yaml", overrides, environ={})
    assert resolved.manifests == (
        (resolved.model_path, CLUSTERS / "a" / "MANIFEST"),
        (resolved.draft_path, Path("/b")),
    )
    assert load_cluster(CLUSTERS / "local.yaml", environ={}).manifests == ()
    with pytest.raises(ConfigError, match=r"draft_manifest.*there is no draft"):
        load_cluster(CLUSTERS / "local-plain.yaml", ["speculation.draft_manifest=/b"], environ={})


def test_models_outside_the_allowed_roots_are_refused(tmp_path: Path) -> None:
    inside, outside = tmp_path / "roots", tmp_path / "elsewhere"
    for path in (inside / "model", outside):
        path.mkdir(parents=True)
    (inside / "link").symlink_to(outside)
    roots = f"model.allowed_roots=[{inside}]"
    cluster = CLUSTERS / "local-plain.yaml"
    load_cluster(cluster, [roots, f"model.path={inside}/model"], environ={})
    for path in (outside, inside / "link", inside / ".." / "elsewhere"):
        with pytest.raises(ConfigError, match=r"model\.path: .*elsewhere is in none of model\.allowed_roots"):
            load_cluster(cluster, [roots, f"model.path={path}"], environ={})
    eagle = [roots, f"model.path={inside}/model", f"speculation.draft_model_path={outside}"]
    with pytest.raises(ConfigError, match=r"draft_model_path: .*elsewhere is in none"):
        load_cluster(CLUSTERS / "local-eagle3.yaml", eagle, environ={})
