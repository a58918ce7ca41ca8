"""The cluster that clients talk to: the tiny model with an EAGLE-3 head, and a chat template that knows tools."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from deploy.tiny_models.word_problems import Problem, take
from tests.cluster.harness import MODEL, RunningCluster

NAME = "tiny"
CONTEXT = 16_384  # agents have long prompts, and a character is about half a token here
TEMPLATE = Path(__file__).with_name("chat_template.jinja")
DRAFT = MODEL.with_name("tiny-eagle3")


def with_long_context(source: Path, target: Path) -> Path:
    """Copy a checkpoint and raise the length that it declares. What it writes beyond its own length is poor."""
    shutil.copytree(source, target)
    file = target / "config.json"
    config: dict[str, Any] = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"max_position_embeddings": CONTEXT}))
    return target


def start(directory: Path) -> RunningCluster:
    """Return a cluster that is not running yet; it is a context manager."""
    model = with_long_context(MODEL, directory / "model")
    shutil.copy(TEMPLATE, model / "chat_template.jinja")
    draft = with_long_context(DRAFT, directory / "draft")
    speculation = {"algorithm": "eagle3", "draft_model_path": str(draft), "steps": 5}
    return RunningCluster(
        directory,
        config={"model": {"path": str(model), "served_name": NAME}, "speculation": speculation},
    )


def problem() -> Problem:
    """Return a word problem that the model solves."""
    return take(1, 78, "heldout")[0]
