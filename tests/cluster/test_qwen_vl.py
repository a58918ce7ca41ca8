"""Qwen2.5-VL through HTTP: the greedy tokens of transformers, with images of any size, graphs, chunks and drafts."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from common.engine.forward.model_runner import load_model
from common.engine.layers.placement import Placement
from common.engine.models.eagle import Eagle3Head
from common.speculation.directory import load_draft_config
from tests.cluster.harness import Client, RunningCluster
from tests.cluster.picture_chats import ASKED, VIDEO, Served, answered, ask, body_of, write_model
from tests.fakes.qwen_vl import build, flatten, rename

pytestmark = pytest.mark.timeout(900)  # two busy cores


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    path = tmp_path_factory.mktemp("served") / "qwen"
    made = write_model(path, lambda names, vocabulary: build(outer=names, vocab_size=vocabulary))
    rename(path, published=True)
    flatten(path)
    return answered(path, *made)


def head_for(target: Path, path: Path) -> Path:
    """A random EAGLE-3 head, written as a checkpoint: verification is exact whatever it drafts."""
    path.mkdir()
    loaded, config = load_model(target, "float32")
    raw = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "hidden_size": config.hidden_size,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": 1e-6,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
        "dtype": "float32",
        "rope_theta": 1000.0,
        "rope_scaling": {"type": "mrope", "mrope_section": list(config.rope.sections)},
    }
    (path / "config.json").write_text(json.dumps(raw))
    # A head is recognised by its tensors, and which it has follows from its config.
    save_file({"fc.weight": torch.zeros(1)}, path / "model.safetensors")
    draft = load_draft_config(path, "eagle3", config)
    head = Eagle3Head(draft, loaded, Placement(torch.float32, torch.device("cpu")))
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for piece in head.pieces():
        tensors[piece.name] = torch.randn(piece.whole, generator=generator) * 0.2
    save_file(tensors, path / "model.safetensors")
    return path


async def test_the_answers_are_those_of_transformers(tmp_path: Path, served: Served) -> None:
    """Rows C1 to C5 for positions on three axes, with text and images in the same batches.

    tests/unit/prefill_node/test_image_axes.py tests decoding without drafts.
    """
    draft = head_for(served.path, tmp_path / "head")
    config: dict[str, Any] = {
        "model": {"path": str(served.path)},
        "speculation": {"algorithm": "eagle3", "steps": 3, "draft_model_path": str(draft)},
        "prefill": {"chunk_tokens": 7, "graphs": "breakable"},
        "kv": {"page_size": 4},
        "decode": {"graphs": "full", "max_running": 2},
    }
    async with RunningCluster(tmp_path, config=config) as cluster, Client(cluster.url) as client:
        both = [*range(len(ASKED)), *range(len(ASKED))]  # the second time with cached prefixes
        found = await asyncio.gather(*(ask(client, body_of(ASKED[index])) for index in both))
        for index, answer in zip(both, found, strict=True):
            assert answer["choices"][0]["message"]["content"] == served.answers[index], ASKED[index]
            assert answer["usage"]["prompt_tokens"] == len(served.prompts[index])
        again = await ask(client, body_of(ASKED[2]))
        assert again["choices"][0]["message"]["content"] == served.answers[2]
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > len(served.prompts[2]) // 2
        narrow = await ask(client, body_of(("a", (402, 2))), 400)
        assert narrow["error"]["param"] == "messages[0].content[1].image_url"
        assert "200 times" in narrow["error"]["message"]
        spelled = await ask(client, body_of((f"a {VIDEO}", (16, 16))), 400)
        assert "videos are not supported" in spelled["error"]["message"]
        film = body_of(("a",))
        film["messages"][0]["content"].append(
            {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AA"}}
        )
        assert "'video_url'" in (await ask(client, film, 400))["error"]["message"]
        await client.wait_idle()
        for node in (await client.info())["nodes"]:
            totals = node["counters"]["graphs"]
            assert totals
            assert all(each["replays"] and not each["fallbacks"] for each in totals), totals
