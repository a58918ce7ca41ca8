"""The cluster that clients talk to: a tiny model that thinks and calls tools, with its EAGLE-3 head."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import yaml

from deploy.tiny_models.word_problems import Problem, take
from tests.cluster.harness import ROOT, RunningCluster

NAME = "tiny"
CONTEXT = 16_384  # agents have long prompts, and a character is about half a token here
CLUSTER = ROOT / "deploy" / "clusters" / "local-tools.yaml"


def with_long_context(source: Path, target: Path) -> str:
    """Copy a checkpoint and raise the length that it declares. What it writes beyond its own length is poor."""
    shutil.copytree(source, target)
    file = target / "config.json"
    config: dict[str, Any] = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"max_position_embeddings": CONTEXT}))
    return str(target)


def start(directory: Path) -> RunningCluster:
    """Return a cluster that is not running yet; it is a context manager."""
    config = yaml.safe_load(CLUSTER.read_text())
    model, speculation, here = config["model"], config["speculation"], CLUSTER.parent
    model["path"] = with_long_context(here / model["path"], directory / "model")
    model["served_name"] = NAME
    draft = "draft_model_path"
    speculation[draft] = with_long_context(here / speculation[draft], directory / "draft")
    return RunningCluster(directory, config=config)


def problem() -> Problem:
    """Return a word problem that the model solves."""
    return take(1, 78, "heldout")[0]
