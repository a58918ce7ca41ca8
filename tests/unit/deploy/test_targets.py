"""Targets of commands: cluster files, model directories, models of the hub, and common mistakes."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from common.errors import ConfigError
from deploy.targets import ModelTarget, read_target


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "runtime"
    directory.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(directory))
    monkeypatch.chdir(tmp_path)
    return directory


def model(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    return path


def target(text: str) -> ModelTarget:
    found = read_target(text)
    assert isinstance(found, ModelTarget)
    return found


def refusal(text: str) -> str:
    with pytest.raises(ConfigError) as raised:
        read_target(text)
    return str(raised.value)


def test_a_file_is_a_cluster_file(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("model: {path: m}\n")
    assert read_target("mine") == Path("mine")
    # The error is raised where the file is read, with its whole path.
    assert read_target("clusters/typo.yaml") == Path("clusters/typo.yaml")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_file_of_a_model_is_no_cluster_file(tmp_path: Path, name: str) -> None:
    (model(tmp_path / "m") / name).write_text("{}")
    assert refusal(f"m/{name}") == "this is a file of the model in m: give that directory"


def test_a_directory_is_served_under_its_name(tmp_path: Path, runtime: Path) -> None:
    found = target(str(model(tmp_path / "Llama-3.1-8B")))
    assert (found.served_name, found.directory) == ("Llama-3.1-8B", tmp_path / "Llama-3.1-8B")
    assert found.cluster_file.parent == runtime / "models"
    assert found.cluster_file.name.startswith("Llama-3-1-8B-")


def test_without_a_place_for_its_file_the_remedy_is_one_that_helps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model has no cluster file yet that could set process.run_dir."""
    found = target(str(model(tmp_path / "mine")))
    nobody = 4_000_000_000 + os.getpid()  # in no other run of this test
    monkeypatch.setattr(os, "getuid", lambda: nobody)
    base = Path(f"/tmp/tandem-{nobody}")  # of another user, who was faster
    try:
        with pytest.raises(ConfigError, match="belongs to another user; .*set XDG_RUNTIME_DIR"):
            found.cluster_file  # noqa: B018
    finally:
        base.rmdir()

    def mkdir(path: Path, *arguments: object, **options: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(Path, "mkdir", mkdir)
    with pytest.raises(ConfigError, match=f"{base}: Read-only file system; .*set XDG_RUNTIME_DIR"):
        found.cluster_file  # noqa: B018


def test_a_link_keeps_its_name_and_is_the_same_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = model(tmp_path / "revision-7")
    (tmp_path / "current").symlink_to(real)
    assert target("current").served_name == "current"
    assert target("current").identity == target("revision-7").identity
    monkeypatch.chdir(real)
    assert target(".").served_name == "revision-7"


def test_models_of_one_name_have_files_of_their_own(tmp_path: Path) -> None:
    first, second = model(tmp_path / "a" / "m"), model(tmp_path / "b" / "m")
    assert target(str(first)).cluster_file != target(str(second)).cluster_file
    assert target(str(first)).cluster_file == target("a/m").cluster_file


def test_a_model_of_the_hub_is_served_under_its_name_there() -> None:
    found = target("Qwen/Qwen3-0.6B")
    assert (found.served_name, found.directory) == ("Qwen/Qwen3-0.6B", None)
    assert found.cluster_file.name.startswith("Qwen-Qwen3-0-6B-")


def test_a_path_that_exists_wins_over_the_hub(tmp_path: Path) -> None:
    model(tmp_path / "Qwen" / "Qwen3-0.6B")
    assert target("Qwen/Qwen3-0.6B").directory == tmp_path / "Qwen" / "Qwen3-0.6B"


def test_a_snapshot_is_served_under_the_name_of_its_model(tmp_path: Path) -> None:
    snapshot = model(tmp_path / "hub" / "models--acme--tiny" / "snapshots" / ("0" * 40))
    assert target(str(snapshot)).served_name == "acme/tiny"


@pytest.mark.parametrize("text", ["nothing", "/no/such/directory", "a/b/c", "-x/y", "a/ b", "../x"])
def test_a_target_that_is_neither_is_refused_with_the_valid_ones(text: str) -> None:
    said = refusal(text)
    assert "no such file or directory" in said
    assert "ORG/NAME" in said


def test_a_path_that_cannot_be_looked_up_is_refused_with_the_reason() -> None:
    assert "File name too long" in refusal("x" * 300)
    assert "no such file or directory" in refusal("~nobody-of-this-host/model")


def test_a_model_in_a_directory_that_is_not_utf_8_is_refused(tmp_path: Path) -> None:
    """Its path is written to a cluster file, which is UTF-8."""
    assert "\\udce9' is not UTF-8; rename it" in refusal(str(model(tmp_path / "mod\udce9")))


def test_a_directory_of_cluster_files_names_one(tmp_path: Path) -> None:
    (tmp_path / "clusters").mkdir()
    (tmp_path / "clusters" / "mine.yaml").write_text("model: {path: m}\n")
    assert "for a cluster file name the file, such as clusters/mine.yaml" in refusal("clusters")
