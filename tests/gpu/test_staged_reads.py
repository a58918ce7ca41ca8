"""Blocks of weight files arrive whole on a GPU whose stream lags: no buffer is filled before its copy has ended."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from common.checkpoint.safetensors_header import read_header
from common.engine.staged_reads import Read, StagedReads

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_buffers_are_not_reused_before_their_copy_is_done(tmp_path: Path) -> None:
    device, path = torch.device("cuda", 0), tmp_path / "model.safetensors"
    content = {f"w{n}": torch.randn(2048, 1024).bfloat16() for n in range(8)}
    save_file(content, path)
    reads: list[Read] = [(name, (slice(None), slice(8, 1000))) for name in content]
    reads += [(name, (slice(3, 2000), slice(None))) for name in content]
    busy = torch.randn(4096, 4096, device=device)
    found = []
    with StagedReads(device, slots=3, slot_bytes=100_000) as staged:
        for block in staged.blocks(read_header(path), reads):
            busy = busy @ busy * 1e-4  # the stream lags the host
            found.append(block)
    for (name, cut), block in zip(reads, found, strict=True):
        assert torch.equal(block.cpu(), content[name][cut]), name
