"""Loads model directories in children with limited memory and CPU time, and reports the results.

    python -m tests.fakes.confined_loader

Reads one JSON line per directory from stdin and answers with one on stdout. Imports happen once: each directory is
loaded in a fork of this process, which may use MEMORY more address space and CPU_SECONDS. A loader that runs away dies
there, without harm to the test run or the machine.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import CLIPVisionModel
from transformers.models.auto.image_processing_auto import AutoImageProcessor

from common.checkpoint.llava_config import LlavaVision
from common.checkpoint.model_config import ModelConfig, model_fingerprint
from common.engine.forward.model_runner import load_model
from common.engine.layers.placement import Placement
from common.engine.models.llava import load_llava
from common.engine.models.qwen_vl import load_qwen
from common.errors import ModelError
from common.node.serving_draft import load_serving_draft
from common.speculation.directory import load_draft_config
from prefill_node.pixel_reader import load_pixel_reader
from router.templates.chat_template import ChatTemplate
from router.tokens.tokenizer import Tokenizer

MEMORY = 512 << 20
CPU_SECONDS = 3
IMPORTED = (CLIPVisionModel, AutoImageProcessor)  # imported early, because they take seconds of CPU time
CPU = Placement(torch.float32, torch.device("cpu"))


def as_router(path: Path, target: Path) -> None:
    ModelConfig.load(path)
    Tokenizer(path)
    ChatTemplate(path)
    model_fingerprint(path)


def as_node(path: Path, target: Path) -> None:
    model_fingerprint(path)
    load_model(path)


def as_vision_node(path: Path, target: Path) -> None:
    config = ModelConfig.load(path)
    assert config.vision is not None
    load = load_llava if isinstance(config.vision, LlavaVision) else load_qwen
    load(path, config, CPU)
    load_pixel_reader(path, config.vision, 1 << 20)


def as_eagle3(path: Path, target: Path) -> None:
    model, config = load_model(target)
    draft = load_draft_config(path, "eagle3", config)
    load_serving_draft(path, draft, 3, 1, model)


def as_mtp(path: Path, target: Path) -> None:
    model, config = load_model(target)
    draft = load_draft_config(path, "mtp", config)
    load_serving_draft(path, draft, 3, 1, model)


READERS: dict[str, Callable[[Path, Path], None]] = {
    "router": as_router,
    "node": as_node,
    "vision": as_vision_node,
    "eagle3": as_eagle3,
    "mtp": as_mtp,
}


def main() -> None:
    for line in sys.stdin:
        task = json.loads(line)
        answer = _in_child(partial(READERS[task["reader"]], Path(task["path"]), Path(task["target"])))
        print(json.dumps(answer), flush=True)


def _in_child(load: Callable[[], None]) -> dict[str, Any]:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        with os.fdopen(writing, "w") as out:
            json.dump(_outcome(load), out)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answered:
        text = answered.read()
    _, status, usage = os.wait4(child, 0)
    if not text:
        number = os.waitstatus_to_exitcode(status)
        name = signal.Signals(-number).name if number < 0 else f"exit {number}"
        return {"outcome": "died", "text": name, "cpu": usage.ru_utime}
    return {**json.loads(text), "cpu": usage.ru_utime}


def _outcome(load: Callable[[], None]) -> dict[str, str]:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        load()
    except ModelError as error:
        return {"outcome": "refused", "text": str(error)}
    except BaseException:
        return {"outcome": "defect", "text": traceback.format_exc()[-3000:]}
    return {"outcome": "loaded", "text": ""}


if __name__ == "__main__":
    main()
