"""Fuzz targets for files: cluster files and every file of a model directory."""

from __future__ import annotations

import json
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path

import safetensors

from common.checkpoint.model_config import ModelConfig
from common.checkpoint.model_json import MAX_DEPTH, parse_json
from common.checkpoint.model_manifest import read_manifest
from common.checkpoint.safetensors_header import parse_header
from common.config.load import load_cluster
from common.errors import ConfigError, ModelError
from common.speculation.directory import load_draft_config
from router.templates.chat_template import ChatTemplate
from router.tokens.tokenizer import Tokenizer
from tests.architecture.source_tree import ROOT
from tests.fuzz.target import Target

MODELS, CLUSTERS = ROOT / "deploy" / "tiny_models", ROOT / "deploy" / "clusters"
DATA_BYTES = 48
HEADER = json.dumps(
    {
        "__metadata__": {"format": "pt"},
        "a": {"dtype": "F32", "shape": [2, 4], "data_offsets": [0, 32]},
        "b": {"dtype": "BF16", "shape": [8], "data_offsets": [32, 48]},
    }
).encode()


@cache
def scratch() -> tempfile.TemporaryDirectory[str]:
    """Return a directory of this process."""
    return tempfile.TemporaryDirectory(prefix="tandem-fuzz-")


def written(name: str, data: bytes, folder: str) -> Path:
    """Return the directory `folder` with nothing in it but `name`."""
    directory = Path(scratch().name) / folder
    directory.mkdir(exist_ok=True)
    (directory / name).write_bytes(data)
    return directory


def safetensors_header(data: bytes) -> None:
    """Whatever our reader accepts, the library accepts too, and both see the same tensors."""
    with suppress(ModelError):
        ours = parse_header(data, DATA_BYTES, Path("model.safetensors"))
        whole = len(data).to_bytes(8, "little") + data + b"\0" * DATA_BYTES
        theirs = dict(safetensors.deserialize(whole))
        assert {name: list(entry.shape) for name, entry in ours.tensors.items()} == {
            name: list(each["shape"]) for name, each in theirs.items()
        }


def model_json(data: bytes) -> None:
    with suppress(ModelError):
        value = parse_json(data, "config.json")
        assert json.loads(data.decode()) == value
        assert _depth(value) <= MAX_DEPTH


def model_config(data: bytes) -> None:
    with suppress(ModelError):
        config = ModelConfig.load(written("config.json", data, "model"))
        assert len(config.sliding_windows) == config.num_layers <= 1024


def generation_config(data: bytes) -> None:
    directory = written("config.json", (MODELS / "tiny-target" / "config.json").read_bytes(), "generation")
    with suppress(ModelError):
        ModelConfig.load(written("generation_config.json", data, directory.name))


@cache
def target() -> ModelConfig:
    return ModelConfig.load(MODELS / "tiny-target")


def draft_config(data: bytes) -> None:
    path = written("config.json", data, "draft")
    for algorithm in ("eagle3", "eagle", "mtp", "standalone"):
        with suppress(ModelError):
            load_draft_config(path, algorithm, target())


def tokenizer(data: bytes) -> None:
    with suppress(ModelError):
        Tokenizer(written("tokenizer.json", data, "tokenizer"))


def chat_template(data: bytes) -> None:
    with suppress(ModelError):
        ChatTemplate(written("tokenizer_config.json", data, "template"))


def manifest(data: bytes) -> None:
    with suppress(ModelError):
        names = read_manifest(written("MANIFEST", data, "manifest") / "MANIFEST")
        assert all(Path(name).name == name for name in names)


def cluster(data: bytes) -> None:
    with suppress(ConfigError):
        load_cluster(written("cluster.yaml", data, "cluster") / "cluster.yaml", environ={})


def _depth(value: object) -> int:
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if inside is None else 1 + max(map(_depth, inside), default=0)


def _configs(*names: str) -> tuple[bytes, ...]:
    return tuple((MODELS / name / "config.json").read_bytes() for name in names)


TARGETS = {
    "safetensors-header": Target(safetensors_header, (HEADER,), 400),
    "model-json": Target(model_json, (HEADER, b'[{"a": [1.5, "\\u00e9", null, true]}]')),
    "model-config": Target(model_config, _configs("tiny-target", "tiny-vision")),
    "generation-config": Target(
        generation_config, ((MODELS / "tiny-target" / "generation_config.json").read_bytes(),)
    ),
    "draft-config": Target(draft_config, _configs("tiny-eagle", "tiny-eagle3", "tiny-mtp"), 75),
    "tokenizer": Target(tokenizer, ((MODELS / "tiny-target" / "tokenizer.json").read_bytes(),), 40),
    "tokenizer-config": Target(
        chat_template, ((MODELS / "tiny-target" / "tokenizer_config.json").read_bytes(),), 40
    ),
    "manifest": Target(manifest, (b"%064x  config.json\n%064x *b\n" % (1, 2),)),
    "cluster-file": Target(
        cluster, tuple((CLUSTERS / name).read_bytes() for name in ("local.yaml", "example.yaml")), 40
    ),
}
