"""Drafts that only read token ids are refused for models that read images: they would embed placeholders."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from common.checkpoint.draft_config import with_steps
from common.checkpoint.model_config import ModelConfig
from common.errors import TakesNoEmbeddings
from common.node.serving_draft import load_serving_draft
from common.speculation.directory import load_draft_config
from prefill_node.draft import ModelPrefill, PrefillDraft
from prefill_node.mtp import MtpPrefill
from tests.unit.checkpoint.test_draft_config import MODELS, TARGET


@pytest.mark.parametrize("algorithm", ["mtp", "standalone"])
def test_a_draft_that_reads_token_ids_only_is_refused_for_a_model_of_images(algorithm: str) -> None:
    """Rows A7, C4: refused at start-up; the error is also a ValueError."""
    path = MODELS / f"tiny-{algorithm}"
    config = load_draft_config(path, algorithm, ModelConfig.load(TARGET))
    config = with_steps(config, 2) if config.modules else config
    vision_model: Any = SimpleNamespace(config=SimpleNamespace(vision=object()))
    with pytest.raises(TakesNoEmbeddings, match=f"a {algorithm} draft reads only token ids") as found:
        load_serving_draft(path, config, 2, 1, vision_model)
    assert isinstance(found.value, ValueError)
    assert "set speculation.algorithm to" in str(found.value)


UNREAD: Any = None


@pytest.mark.parametrize(
    "draft", [MtpPrefill([], 16, 8), ModelPrefill(lambda batch: UNREAD)], ids=["mtp", "standalone"]
)
def test_a_prompt_with_embeddings_is_not_drafted_from_its_token_ids(draft: PrefillDraft) -> None:
    """Rows A7, C4: the prefill node's own check, in case such a draft ever meets a batch with images."""
    given: Any = object()
    with pytest.raises(ValueError, match="cannot use image embeddings"):
        draft.extend((), given, given, None, given)
