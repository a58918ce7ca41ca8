"""process.gpu_sharing: which clusters allow it, and how a node joins the MPS server."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from common import mps
from common.config import Resolved, load_cluster
from common.config.gpu_sharing import join_sharing, server_directory
from common.errors import ConfigError

GPUS = "{name: prefill-0, device: cuda:0}", "{name: decode-0, device: cuda:0}"
NAMES = (mps.DIRECTORY, mps.PRIORITY)


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory whose path leaves room for sockets; afterwards the environment is as before."""
    with tempfile.TemporaryDirectory(prefix="td") as text:
        directory = Path(text)
        for name in NAMES:
            monkeypatch.setenv(name, "theirs")  # so that the old value is restored
            monkeypatch.delenv(name)
        yield directory


def options(sharing: str, prefill: str = GPUS[0], decode: str = GPUS[1]) -> list[str]:
    return [f"process.gpu_sharing={sharing}", f"prefill.nodes=[{prefill}]", f"decode.nodes=[{decode}]"]


def loaded(place: Path, *overrides: str) -> Resolved:
    file = place / "c.yaml"
    file.write_text(f"model: {{path: m}}\nprocess: {{run_dir: {place / 'run'}}}\n")
    return load_cluster(file, overrides, {})


@pytest.mark.parametrize(
    ("prefill", "decode", "more", "words"),
    [
        ("{name: p}", "{name: d}", [], "decode_first is for nodes on GPUs, and all are on cpu; leave it out"),
        (GPUS[0], "{name: d, devices: [cuda:0, cuda:1]}", [], "nodes of several ranks such as d"),
        (
            "{name: m, device: cuda}",
            "{name: m, device: cuda}",
            ["movable.nodes=[{name: m}]"],
            "does not serve movable nodes such as m; write turns",
        ),
    ],
)
def test_clusters_that_cannot_share_gpus(
    place: Path, prefill: str, decode: str, more: list[str], words: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        loaded(place, *options("decode_first", prefill, decode), *more)
    assert str(refused.value).startswith("process.gpu_sharing: ")
    assert words in str(refused.value)
    loaded(place, *options("turns", prefill, decode), *more)


KINDS = {"stream": socket.SOCK_STREAM, "seqpacket": socket.SOCK_SEQPACKET}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sharing", ["decode_first", "evenly"])
@pytest.mark.parametrize("prefill", [True, False])
def test_a_node_joins_the_server_with_its_priority(
    place: Path, sharing: str, prefill: bool, kind: str
) -> None:
    resolved = loaded(place, *options(sharing))
    directory = server_directory(resolved)
    directory.mkdir(parents=True)
    with ExitStack() as opened:
        listening = opened.enter_context(socket.socket(socket.AF_UNIX, KINDS[kind]))
        listening.bind(str(directory / "control"))
        listening.listen()
        join_sharing(resolved, on_gpu=True, prefill=prefill, patience=0.0)
    low = prefill and sharing == "decode_first"
    assert [os.environ.get(name) for name in NAMES] == [str(directory), "1" if low else None]
    assert mps.mps_is_used()


def test_nodes_that_take_turns_join_nothing(place: Path) -> None:
    join_sharing(loaded(place, *options("turns")), on_gpu=True, prefill=True, patience=0.0)
    join_sharing(loaded(place, *options("evenly")), on_gpu=False, prefill=True, patience=0.0)
    assert not set(NAMES) & set(os.environ)


def test_a_node_without_a_server_is_refused(place: Path) -> None:
    """A socket that an ended server left does not count as one."""
    resolved = loaded(place, *options("evenly"))
    directory = server_directory(resolved)
    directory.mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(directory / "control"))
    with pytest.raises(
        ConfigError, match="none answers in .*/run/mps; with the launch scripts leave this key out"
    ):
        join_sharing(resolved, on_gpu=True, prefill=True, patience=0.0)
    assert mps.DIRECTORY not in os.environ
