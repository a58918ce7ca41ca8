from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def directory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cluster file, an empty model directory, and a run directory with a path short enough for sockets."""
    for name in list(os.environ):
        if name.startswith("TANDEM_"):
            monkeypatch.delenv(name)
    with tempfile.TemporaryDirectory(prefix="td") as path:
        (Path(path) / "c.yaml").write_text("model: {path: m}\nprocess: {run_dir: run}\n")
        (Path(path) / "m").mkdir()
        yield Path(path)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Compute on one thread of this process: on tiny models, more threads take longer."""
    # Most tests of this folder do without torch, whose import takes seconds.
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
