"""A tokenizer with more tokens than the model has embeddings."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import aiohttp
import pytest

from common.config import load_cluster
from common.config.router_processes import RouterProcess
from common.errors import ModelError
from common.observability.logs import Log
from router.build import build
from tests.fakes.waiting import PATIENCE
from tests.unit.router.conftest import TINY

pytestmark = pytest.mark.usefixtures("text_forks")

ONLY = RouterProcess(0, ())
VOCAB = 704  # of the model


def cluster_of(tmp_path: Path, name: str, added: bool) -> Path:
    """Write a cluster file for a copy of a model whose tokenizer has one token more."""
    model = tmp_path / "model"
    shutil.copytree(TINY, model)
    file = model / "tokenizer.json"
    raw = json.loads(file.read_text())
    raw["model"]["vocab"][name] = VOCAB
    if added:
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        raw["added_tokens"].append({"id": VOCAB, "content": name, "special": True, **flags})
    file.write_text(json.dumps(raw))
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text(
        f"""
model: {{path: "{model}"}}
router: {{port: 0, control_address: "ipc://{tmp_path}/c"}}
health: {{drain_timeout: 1.0}}
process: {{run_dir: "{tmp_path}/r"}}
prefill: {{nodes: [{{name: p0}}]}}
decode: {{nodes: [{{name: d0}}]}}
"""
    )
    return cluster


async def test_prompts_with_an_added_token_that_the_model_lacks_are_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Gemma 3's text models have a token for images only in their tokenizer."""
    app = build(load_cluster(cluster_of(tmp_path, "<picture>", True), []), ONLY, Log("test"))
    assert "no embeddings of some added tokens of its tokenizer" in caplog.text
    await app.start()
    host, port = app.http.public.addresses[0][:2]
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "integer"}}}
    async with aiohttp.ClientSession(f"http://{host}:{port}") as session:
        for text, status, said in (
            ("a <picture>", 400, f"token ids must be from 0 to {VOCAB - 1}"),
            ("a picture", 503, "node"),
        ):
            body = {"messages": [{"role": "user", "content": text}], "response_format": schema}
            async with session.post("/v1/chat/completions", json=body) as response:
                assert (response.status, said in await response.text()) == (status, True)
    await asyncio.wait_for(app.drain(), PATIENCE)


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    cluster = load_cluster(cluster_of(tmp_path, "picture", False), [])
    with pytest.raises(ModelError, match=rf"1 tokens with ids above {VOCAB - 1}.*it is for another model"):
        build(cluster, ONLY, Log("test"))
