"""deploy/up ORG/NAME against a hub on loopback: what is fetched, what is printed, and what is not."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from common.checkpoint.model_files import INDEX, SINGLE
from common.errors import ConfigError
from deploy.hub import find_snapshot
from tests.architecture.source_tree import ROOT
from tests.fakes.hub_server import COMMIT, OLDER, HubServer, running
from tests.fakes.waiting import PATIENCE

MODEL = ROOT / "deploy" / "tiny_models" / "tiny-target"
NAME = "acme/tiny"
TOKEN = "hf_secretsecretsecret"
# The client of the hub waits longer and longer before it tries again: a test needs no such pause.
ASK = """
import sys
import time
time.sleep = lambda seconds: None
from common.errors import ConfigError
from deploy.hub import find_snapshot
try:
    found = find_snapshot(sys.argv[1], sys.argv[2] or None, print)
    print("FOUND", found.name, found)
except ConfigError as error:
    print("REFUSED", error)
"""
NEVER_FETCHED = {
    "README.md": b"# words",
    "pytorch_model.bin": b"PK..",
    "tiny.gguf": b"GGUF",
    "consolidated.safetensors": b"the same weights again",
    "onnx/model.onnx": b"onnx",
    "original/params.json": b"{}",
    "modeling_tiny.py": b"print('never run')",
}


def model_files() -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in MODEL.iterdir() if path.name != "README.md"}


async def ask(home: Path, endpoint: str, revision: str = "", **environment: str) -> str:
    """What `find_snapshot` prints in a child process, because huggingface_hub reads its settings at import."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "TANDEM_"))}
    settings = {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_TOKEN": TOKEN, **environment}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", ASK, NAME, revision),
        cwd=ROOT,
        env={**kept, "PYTHONPATH": str(ROOT), **settings},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    said, _ = await asyncio.wait_for(process.communicate(), PATIENCE)
    assert TOKEN not in said.decode()
    return said.decode()


@contextmanager
def no_hub() -> Iterator[str]:
    """Yield an address that accepts no connection. Its port is held, so that no other process listens there."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{held.getsockname()[1]}"


def found(said: str) -> Path:
    line = next(line for line in said.splitlines() if line.startswith("FOUND "))
    return Path(line.split(" ", 2)[2])


async def test_only_what_a_node_reads_is_fetched_and_the_commit_is_printed(tmp_path: Path) -> None:
    async with running(HubServer(NAME, {**model_files(), **NEVER_FETCHED})) as hub:
        said = await ask(tmp_path, hub.url)
    assert f"FOUND {COMMIT}" in said, said
    assert f"{NAME}: commit {COMMIT}" in said
    assert hub.fetched == set(model_files())
    directory = found(said)
    assert {path.name for path in directory.iterdir()} == set(model_files())
    assert (directory / SINGLE).read_bytes() == (MODEL / SINGLE).read_bytes()
    assert hub.tokens == {f"Bearer {TOKEN}"}


async def test_a_model_in_the_cache_needs_no_network(tmp_path: Path) -> None:
    async with running(HubServer(NAME, model_files())) as hub:
        first = found(await ask(tmp_path, hub.url))
        hub.asked.clear()
        again = await ask(tmp_path, hub.url)
        assert hub.asked == []
    assert found(again) == first
    assert "from the cache" in again
    # The hub has ended.
    assert found(await ask(tmp_path, hub.url, HF_HUB_OFFLINE="1")) == first
    assert found(await ask(tmp_path, hub.url, revision=COMMIT)) == first


@pytest.mark.parametrize("name", ["acme/a--b", "acme/a..b", "acme/a.git"])
def test_a_name_that_the_hub_cannot_have_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"'{name}'"):
        find_snapshot(name, None, print)


async def test_a_revision_pins(tmp_path: Path) -> None:
    async with running(HubServer(NAME, model_files())) as hub:
        assert f"FOUND {OLDER}" in await ask(tmp_path, hub.url, revision="older")
        assert f"FOUND {COMMIT}" in await ask(tmp_path, hub.url)
        said = await ask(tmp_path, hub.url, revision="no-such-branch")
    assert f"REFUSED {NAME} has no revision 'no-such-branch'" in said


async def test_an_interrupted_download_is_resumed(tmp_path: Path) -> None:
    async with running(HubServer(NAME, model_files())) as hub:
        directory = found(await ask(tmp_path, hub.url))
        (directory / SINGLE).unlink()
        hub.fetched.clear()
        found(await ask(tmp_path, hub.url))
    assert (directory / SINGLE).read_bytes() == (MODEL / SINGLE).read_bytes()
    (directory / SINGLE).unlink()
    with no_hub() as url:
        said = await ask(tmp_path, url)
    assert "REFUSED" in said
    assert "missing or incomplete" in said


async def test_sharded_weights_are_fetched_by_their_index(tmp_path: Path) -> None:
    files = {name: content for name, content in model_files().items() if name != SINGLE}
    shards = {"part-a.safetensors": b"a", "part-b.safetensors": b"b"}
    index = {"weight_map": {"x": "part-a.safetensors", "y": "part-b.safetensors"}}
    extra = {INDEX: msgspec.json.encode(index), "part-c.safetensors": b"not in the index"}
    async with running(HubServer(NAME, {**files, **shards, **extra})) as hub:
        found(await ask(tmp_path, hub.url))
    assert hub.fetched == {*files, *shards, INDEX}


async def test_a_model_that_is_not_served_is_refused_before_its_weights(tmp_path: Path) -> None:
    files = {**model_files(), "config.json": b'{"architectures": ["MambaForCausalLM"]}'}
    async with running(HubServer(NAME, files)) as hub:
        said = await ask(tmp_path, hub.url)
    assert "architecture MambaForCausalLM is not supported" in said
    assert SINGLE not in hub.fetched


async def test_a_model_without_safetensors_is_refused(tmp_path: Path) -> None:
    files = {name: content for name, content in model_files().items() if name != SINGLE}
    async with running(HubServer(NAME, {**files, "pytorch_model.bin": b"PK"})) as hub:
        said = await ask(tmp_path, hub.url)
    assert "REFUSED" in said
    assert "found no weights" in said
    assert hub.fetched == set(files)


async def test_the_error_of_a_gated_model_names_where_to_accept_its_terms(tmp_path: Path) -> None:
    async with running(HubServer(NAME, model_files(), gated=True)) as hub:
        said = await ask(tmp_path, hub.url)
    assert (
        f"REFUSED {NAME} is gated: accept its terms at {hub.url.rpartition('//')[2]}/{NAME}"
        in said.replace("http://", "")
    )
    assert "hf auth login" in said


async def test_a_model_that_the_hub_does_not_have(tmp_path: Path) -> None:
    async with running(HubServer("acme/other", model_files())) as hub:
        said = await ask(tmp_path, hub.url)
    assert f"has no model {NAME}, or it is private" in said


@pytest.mark.parametrize(
    ("environment", "reason"),
    [({}, "cannot be reached"), ({"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE is set")],
)
async def test_without_a_network_the_error_names_the_remedy(
    tmp_path: Path, environment: dict[str, str], reason: str
) -> None:
    with no_hub() as url:
        said = await ask(tmp_path, url, **environment)
    assert f"REFUSED {NAME} is missing or incomplete in the cache ({tmp_path}/hub)" in said
    assert reason in said
    assert f"hf download {NAME} --local-dir DIR" in said
    assert "Traceback" not in said
