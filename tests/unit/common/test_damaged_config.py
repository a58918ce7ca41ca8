"""Shipped cluster files of which one key has another value: they are accepted, or refused by the name of that key."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from common.config import load_cluster
from common.config.cluster_schema import cluster_schema
from common.config.keys import schema_paths
from common.errors import ConfigError

FILES = sorted((Path(__file__).parents[3] / "deploy" / "clusters").glob("*.yaml"))
KEYS = sorted(path for _, path in schema_paths(cluster_schema()))
# Keys that are refused by the name of another one, which they require.
TOGETHER = ("router.tls.cert", "router.tls.key")
NODES = ("prefill.nodes", "decode.nodes")
TEXTS = ["", "x", "-1", "\0", "\u00e4/../..", "~nobody/x", "1.2.3.4:99999", "cuda:0", "a,b"]
NUMBERS = [-1, 0, 1, 2**31, 2**63, 2**80, -0.5, 1e308, math.inf, math.nan]
OTHERS: list[Any] = [None, True, [], [1], ["a"], [None], {}, {"a": 1}, [{"name": "x"}]]


def changed(file: Path, key: str, value: object, directory: Path) -> Path:
    """Write a copy of a cluster file in which a key has this value."""
    data = yaml.safe_load(file.read_text())
    *sections, name = key.split(".")
    inner = data
    for each in sections:
        inner = inner.setdefault(each, {})
    inner[name] = value
    path = directory / "cluster.yaml"
    path.write_text(yaml.safe_dump(data))
    return path


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("clusters")


@settings(max_examples=60)
@given(
    file=st.sampled_from(FILES),
    key=st.sampled_from([each for each in KEYS if each not in NODES]),
    value=st.sampled_from([*TEXTS, *NUMBERS, *OTHERS]),
)
def test_one_other_value_is_accepted_or_refused_by_name(
    file: Path, key: str, value: object, directory: Path
) -> None:
    path, refused = changed(file, key, value, directory), None
    try:
        load_cluster(path, environ={})
    except ConfigError as error:
        refused = error
    if refused is not None and key not in TOGETHER:
        named = refused.path.partition("[")[0]
        about = named == key or named.startswith(f"{key}.") or key.startswith(f"{named}.")
        assert about or key in str(refused), f"{key} = {value!r}: {refused}"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model.path", "a\0b"),
        ("speculation.draft_model_path", "a\0b"),
        ("security.api_keys", "a\0b"),
        ("model.allowed_roots", ["/", "/a\0b"]),
    ],
)
def test_a_zero_byte_is_refused_by_name(key: str, value: object, directory: Path) -> None:
    """It cannot be part of the name of a file, and ended the process with a traceback."""
    file = changed(FILES[0].with_name("local-eagle.yaml"), key, value, directory)
    with pytest.raises(ConfigError, match=f"{key}: a value must not contain a zero byte"):
        load_cluster(file, environ={})
