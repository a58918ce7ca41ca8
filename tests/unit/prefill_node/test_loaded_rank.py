"""Before a rank serves, it runs what no graph has run, so that no kernel is compiled while requests wait."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from common.config import load_cluster
from common.config.resolve_node import node_plan
from common.engine.attention.paged import PagedAttention
from common.node.ranks.sole_rank import SoleRank
from common.observability.logs import Log
from common.observability.startup import StartupReporter
from prefill_node.build import compiled_bodies, prompt_sizes
from prefill_node.images import NoImages
from prefill_node.loaded_rank import LoadedPromptRank, load_prompt_rank
from prefill_node.vision import TextEmbeds
from prefill_node.vision_stage import VisionStage

MODELS = Path(__file__).parents[3] / "deploy" / "tiny_models"
LOG = Log("prefill-0")
FILE = """
model: {path: %s}
process: {run_dir: run}
prefill:
  pool_tokens: 512
  chunk_tokens: 256
  max_batch: 200
  graphs: none
  host_mib: %d
  nodes: [{name: prefill-0, device: cpu}]
decode: {pool_tokens: 512, nodes: [{name: decode-0, device: cpu}]}
speculation: {algorithm: %s, draft_model_path: %s, steps: 2}
"""
NO_DRAFT = """
model: {path: %s}
process: {run_dir: run}
prefill: {pool_tokens: 512, chunk_tokens: 256, max_batch: 200, graphs: none, nodes: [{name: prefill-0, device: cpu}]}
decode: {pool_tokens: 512, nodes: [{name: decode-0, device: cpu}]}
"""


def loaded(file: Path) -> LoadedPromptRank:
    resolved = load_cluster(file)
    plan = node_plan(resolved.cluster, "prefill", "prefill-0", resolved.model_path, resolved.draft_path)
    stage = VisionStage(NoImages(), TextEmbeds())
    with StartupReporter(None, LOG) as reporter:
        return load_prompt_rank(
            plan,
            prompt_sizes(resolved.cluster, plan),
            SoleRank(reporter),
            lambda served: lambda wanted: stage,
            compiled_bodies(None, "cpu"),
            LOG,
        )


@pytest.mark.parametrize(
    ("text", "draft"),
    [
        (NO_DRAFT % (MODELS / "tiny-target"), ()),
        (FILE % (MODELS / "tiny-target", 0, "eagle3", MODELS / "tiny-eagle3"), (256, 200)),
        (FILE % (MODELS / "tiny-target", 64, "eagle3", MODELS / "tiny-eagle3"), (256, 200)),
        (FILE % (MODELS / "tiny-target", 0, "standalone", MODELS / "tiny-standalone"), (256, 200)),
        # Each of the two modules may run over a row before those of a chunk.
        (FILE % (MODELS / "tiny-target", 0, "mtp", MODELS / "tiny-mtp"), (256 + 2 * 200, 200)),
    ],
    ids=["no_draft", "head", "loads", "model", "modules"],
)
def test_attention_of_target_and_draft_is_warmed_up_for_as_many_prompts_as_a_forward_may_have(
    text: str, draft: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run: list[tuple[object, ...]] = []

    def warm_up(self: PagedAttention, heads: int, dtype: torch.dtype, *sizes: int) -> None:
        run.append((self, heads, dtype, *sizes))

    monkeypatch.setattr(PagedAttention, "warm_up", warm_up)
    file = tmp_path / "cluster.yaml"
    file.write_text(text)
    rank = loaded(file)
    forwards = rank.forwards()
    run.clear()
    rank.capture(forwards, LOG)
    served = rank.served
    expected: list[tuple[object, ...]] = [
        (forwards.attention, served.config.num_heads, torch.float32, 256, 200)
    ]
    if draft:
        assert served.draft is not None
        heads = served.draft.config.model.num_heads
        expected.append((forwards.draft_attention, heads, torch.float32, *draft))
    assert run == expected
