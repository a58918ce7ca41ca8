"""`deploy/convert`: the tensors of .bin files as safetensors, and what a hostile file can do in the child process."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from common.checkpoint.model_files import read_weight_files, weight_paths
from common.errors import ModelError
from deploy.convert import PICKLED_INDEX, convert, pickled_files
from deploy.pickled_weights import Unreadable, reason_of, tensors_of
from tests.architecture.source_tree import ROOT, modules
from tests.fakes.published_heads import FORMS
from tests.fakes.published_heads import tensors_of as head_tensors
from tests.fakes.waiting import PATIENCE


def test_one_file(tmp_path: Path) -> None:
    """The refusal names the command, and after it the directory is read."""
    tensors = head_tensors(FORMS["eagle-two-layers"])
    shared = {**tensors, "again": next(iter(tensors.values())), "half": torch.ones(2, 3).bfloat16().T}
    torch.save(shared, tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match=f"deploy/convert {tmp_path} writes them"):
        weight_paths(tmp_path)
    said: list[str] = []
    convert(tmp_path, said.append)
    assert said[-1] == f"wrote model.safetensors in {tmp_path}"
    found = load_file(tmp_path / "model.safetensors")
    assert set(found) == set(shared)
    assert all(
        torch.equal(found[name], value) and found[name].dtype == value.dtype for name, value in shared.items()
    )
    assert read_weight_files(tmp_path)
    with pytest.raises(ModelError, match="has model.safetensors already"):
        convert(tmp_path, said.append)


def test_files_of_an_index_in_both_formats_of_torch(tmp_path: Path) -> None:
    parts = {
        "a.bin": {"x": torch.arange(6.0)},
        "b.bin": {"y": torch.ones(3), "z": torch.zeros(1, dtype=torch.int64)},
    }
    for name, tensors in parts.items():
        torch.save({"state_dict": tensors}, tmp_path / name, _use_new_zipfile_serialization=name == "a.bin")
    weight_map = {tensor: name for name, tensors in parts.items() for tensor in tensors}
    (tmp_path / PICKLED_INDEX).write_text(json.dumps({"weight_map": weight_map}))
    (tmp_path / "training_args.bin").write_bytes(b"not part of the model")
    convert(tmp_path, lambda line: None)
    assert [path.name for path in weight_paths(tmp_path)] == [
        f"model-0000{at}-of-00002.safetensors" for at in (1, 2)
    ]
    found = {name: value for path in weight_paths(tmp_path) for name, value in load_file(path).items()}
    for tensors in parts.values():
        assert all(torch.equal(found[name], value) for name, value in tensors.items())
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(weight_map)


class Runs:
    """Unpickling it creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def test_code_in_a_file_does_not_run(tmp_path: Path) -> None:
    torch.save({"x": Runs(tmp_path / "ran")}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match="cannot be converted: it contains more than tensors"):
        convert(tmp_path, lambda line: None)
    assert [path.name for path in tmp_path.iterdir()] == ["pytorch_model.bin"]


def test_a_small_file_with_a_large_tensor_ends_at_the_limit_of_memory(tmp_path: Path) -> None:
    """A view that repeats one value takes 64 GiB once it is written."""
    torch.save({"x": torch.zeros(1).expand(1 << 34)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match="cannot be converted: .*tried to allocate 68719476736 bytes"):
        convert(tmp_path, lambda line: None)
    assert [path.name for path in tmp_path.iterdir()] == ["pytorch_model.bin"]


def test_the_number_of_cores_takes_nothing_of_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy by the threads of 192 cores, for whose stacks the limit has no room."""
    monkeypatch.setenv("OMP_NUM_THREADS", "192")
    monkeypatch.setenv("MKL_DYNAMIC", "FALSE")
    torch.save({"x": torch.ones(1000, 200).t()}, tmp_path / "pytorch_model.bin")
    convert(tmp_path, lambda line: None)
    assert torch.equal(load_file(tmp_path / "model.safetensors")["x"], torch.ones(200, 1000))


def test_a_directory_in_which_the_index_cannot_be_written_stays_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["pytorch_model-00001.bin", "pytorch_model-00002.bin"]
    for name in names:
        torch.save({name: torch.ones(2)}, tmp_path / name)
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": {x: x for x in names}}))
    before = sorted(tmp_path.iterdir())

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(ModelError, match="cannot write to .*: No space left on device"):
        convert(tmp_path, lambda line: None)
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ([torch.zeros(1)], "contains a list, not the tensors of a model"),
        ({}, "contains a dict, not the tensors of a model"),
        ({"x": 3}, "'x' is a int, not a tensor"),
        ({3: torch.zeros(1)}, "'3' is a Tensor, not a tensor"),
    ],
)
def test_other_content_is_refused(content: Any, sentence: str) -> None:
    with pytest.raises(Unreadable, match=sentence):
        tensors_of(content, torch.Tensor)


@pytest.mark.parametrize("kept", [0, 10, 5000])
@pytest.mark.parametrize("zipped", [True, False])
def test_a_truncated_file_is_called_so(kept: int, zipped: bool, tmp_path: Path) -> None:
    file = tmp_path / "pytorch_model.bin"
    torch.save({"x": torch.zeros(10_000)}, file, _use_new_zipfile_serialization=zipped)
    os.truncate(file, kept)
    with pytest.raises((EOFError, OSError, RuntimeError)) as failure:
        torch.load(file, weights_only=True)  # noqa: TID251
    assert re.search("ends too early|corrupted", reason_of(failure.value))


def test_the_child_has_no_network() -> None:
    code = (
        "import socket, sys; from deploy.pickled_weights import leave_network\n"
        "if not leave_network(): print('shared'); sys.exit()\n"
        "try: socket.create_connection(('127.0.0.1', int(sys.argv[1])), 5); print('connected')\n"
        "except OSError: print('alone')"
    )
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        done = subprocess.run(
            [sys.executable, "-c", code, port],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=True,
        )
    if done.stdout.strip() == "shared":
        pytest.skip("this system permits no network namespace")
    assert done.stdout.strip() == "alone"


def test_which_files_are_converted(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"cannot tell which .bin files are the model's \(found none\)"):
        pickled_files(tmp_path)
    for name in ("one.bin", "two.bin"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(ModelError, match=r"found one.bin, two.bin"):
        pickled_files(tmp_path)
    (tmp_path / "two.bin").unlink()
    assert pickled_files(tmp_path) == [tmp_path / "one.bin"]
    for name in ("../one.bin", "one.safetensors"):
        (tmp_path / PICKLED_INDEX).write_text(json.dumps({"weight_map": {"x": name}}))
        with pytest.raises(ModelError, match="only .bin files beside it are converted"):
            pickled_files(tmp_path)
    (tmp_path / PICKLED_INDEX).write_text(json.dumps({"weight_map": [1]}))
    with pytest.raises(ModelError, match="must give the name of a file for each tensor"):
        pickled_files(tmp_path)


def test_only_the_command_itself_converts() -> None:
    """Servers and `deploy/up` refuse .bin files and never read them."""
    for module in modules():
        imported = {each.target for each in module.imports if each.target.startswith("deploy.")}
        assert not any(target.startswith("deploy.convert") for target in imported), module.place
        reads = any(target.startswith("deploy.pickled_weights") for target in imported)
        assert not reads or module.name == "deploy.convert", module.place
