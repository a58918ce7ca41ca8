"""A draft whose rope depends on the length of requests takes that of the target's longest request."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.config import Cluster
from common.config.resolve_node import node_plan
from common.config.schema import Model, Speculation
from common.node.loaded_draft import ModelDraft
from common.node.serving_draft import ServingDraft
from common.node.serving_model import load_serving_model
from common.observability.logs import Log
from common.observability.startup import StartupReporter
from tests.unit.checkpoint.test_draft_config import TARGET, copy_of
from tests.unit.engine import families

# The longest request, and whether a rope of 64 original positions takes its long factors.
LENGTHS = [(64, False), (65, True), (None, True)]


def draft_of(target: Path, draft: Path, algorithm: str, max_model_len: int | None) -> ServingDraft:
    speculation = Speculation(algorithm=algorithm, draft_model_path=str(draft))
    cluster = Cluster(model=Model(path=str(target), max_model_len=max_model_len), speculation=speculation)
    plan, log = node_plan(cluster, "decode", "decode-0", target, draft), Log("test")
    served = load_serving_model(plan, StartupReporter(None, log), log)
    assert served.draft is not None
    return served.draft


@pytest.mark.parametrize(("max_model_len", "long"), LENGTHS)
def test_language_model(max_model_len: int | None, long: bool, tmp_path: Path) -> None:
    path = families.save(families.build("phi3-longrope", original_max_position_embeddings=64), tmp_path)
    draft = draft_of(path, path, "standalone", max_model_len)
    assert isinstance(draft.loaded, ModelDraft)
    assert (draft.config.model.rope.long, draft.loaded.model.config.rope.long) == (long, long)


@pytest.mark.parametrize(("max_model_len", "long"), LENGTHS)
def test_head(max_model_len: int | None, long: bool, tmp_path: Path) -> None:
    factors = {"short_factor": [1.0] * 32, "long_factor": [4.0] * 32}
    rope = {"type": "longrope", **factors, "original_max_position_embeddings": 64}
    head = copy_of(tmp_path, "tiny-eagle", rope_scaling=rope)
    assert draft_of(TARGET, head, "eagle", max_model_len).config.model.rope.long is long
