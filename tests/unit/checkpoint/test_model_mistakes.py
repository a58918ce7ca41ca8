"""Arguments that are not a model directory are recognized, and the error says what to pass instead."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.checkpoint.model_config import ModelConfig
from common.checkpoint.model_directory import read_bytes
from common.checkpoint.model_mistakes import explain_directory, explain_weight_file
from common.checkpoint.safetensors_header import read_header
from common.errors import ModelError


def holding(directory: Path, *names: str) -> Path:
    for name in names:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text("x")
    return directory


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ((), "is empty"),
        (("adapter_config.json", "adapter_model.safetensors"), "merge it into its base model"),
        (("model-Q4_K_M.gguf", "README.md"), r"GGUF files \(model-Q4_K_M.gguf\)"),
        (
            ("models--acme--tiny/refs/main", "version.txt"),
            "root of a Hugging Face cache; .*deploy/up acme/tiny",
        ),
        (
            ("hub/models--acme--tiny/refs/main", "token"),
            "home of a Hugging Face cache; .*deploy/up acme/tiny",
        ),
        (("params.json", "consolidated.00.pth"), "its maker's own format"),
        (("a.txt", "b.txt"), "has no config.json, so it is not a model directory; it contains a.txt, b.txt"),
    ],
)
def test_directories_without_a_config_are_explained(
    tmp_path: Path, names: tuple[str, ...], said: str
) -> None:
    directory = tmp_path / "given"
    directory.mkdir()
    holding(directory, *names)
    with pytest.raises(ModelError, match=said) as raised:
        ModelConfig.load(directory)
    assert str(raised.value).startswith(f"{directory} ")


def test_a_path_that_does_not_exist_is_said_to_be_missing(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=f"^{tmp_path}/none does not exist: correct the path$"):
        ModelConfig.load(tmp_path / "none")
    file = tmp_path / "model.safetensors"
    file.write_text("x")
    with pytest.raises(ModelError, match=f"^{file} is a file: give the directory that contains it$"):
        ModelConfig.load(file)


def test_the_cache_folder_of_one_model_names_the_model_and_a_revision(tmp_path: Path) -> None:
    folder = holding(tmp_path / "models--acme--tiny", f"snapshots/{'0' * 40}/config.json")
    for given in (folder, folder / "snapshots"):
        said = explain_directory(given)
        assert "deploy/up acme/tiny" in said
        assert f"{folder}/snapshots/{'0' * 40}" in said
    assert "run deploy/up acme/none to download it" in explain_directory(
        holding(tmp_path / "models--acme--none", "refs/main")
    )


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 4\n", "git lfs pull"),
        (b"GGUF\x03\x00\x00\x00 and so on", "is a GGUF file"),
        (b"PK\x03\x04 and so on and on", "is a PyTorch"),
    ],
)
def test_files_that_are_no_safetensors_are_named(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=said) as raised:
        read_header(path)
    assert str(raised.value).startswith(f"{path} ")


@pytest.mark.parametrize("start", [b"", b"v", b"\x10\x00\x00\x00\x00\x00\x00\x00{}"])
def test_an_unknown_start_explains_nothing(start: bytes) -> None:
    assert explain_weight_file(start) is None


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_small_files_may_be_pointers_too(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 4\n")
    with pytest.raises(ModelError, match=r"is a Git-LFS pointer.*git lfs pull"):
        read_bytes(path, 1 << 20)
