"""Several modules of published forms, loaded from files and run by a pair of nodes, each for its step.

Row D9: before every round, the drafts of all modules equal those that transformers' modules make after the whole text.
"""

from __future__ import annotations

import functools
import random
from pathlib import Path

import pytest

from common.checkpoint.draft_config import with_steps
from common.checkpoint.model_config import ModelConfig
from common.engine.forward.draft_inputs import DraftExtendInput
from common.engine.forward.model_runner import load_model
from common.engine.forward.mtp_runner import MtpRunner
from common.engine.models.causal_lm import CausalLM
from common.node.serving_draft import ServingDraft, load_serving_draft
from common.speculation.directory import load_draft_config
from decode_node.request import DecodeRequest
from decode_node.speculative.drafters.mtp import MtpDrafter
from tests.fakes.draft_models import Watched
from tests.fakes.drafters import Bench, speculative
from tests.fakes.node_cluster import ONE_BEHIND, NodeCluster, NoDraftModel, Shape
from tests.fakes.published_mtp import PUBLISHED, Saved, save
from tests.unit.engine import families

LONG = [(7 * n + 3 * n * n) % families.VOCAB for n in range(150)]
HIT = 0.6  # probability that the right token replaces a draft: random modules are seldom right


class Modules(NoDraftModel):
    """The modules of a directory, as nodes load them."""

    algorithm = "mtp"

    def __init__(self, saved: Saved, steps: int) -> None:
        config = load_draft_config(saved.draft, "mtp", ModelConfig.load(saved.target))
        self.config = with_steps(config, steps)
        self.aux_layers = self.config.aux_layers
        self.target: CausalLM = load_model(saved.target, aux_layers=self.aux_layers)[0]
        self._load = functools.partial(load_serving_draft, saved.draft, self.config, steps, 1)

    def serving(self) -> ServingDraft:
        return self._load(self.target)


class Compared(Watched):
    """Compares the drafts of each round with those of transformers' modules, and counts what is to be accepted."""

    def __init__(self, inner: MtpDrafter, bench: Bench, saved: Saved) -> None:
        super().__init__(inner, bench)
        self._saved = saved
        self._random = random.Random(3)
        self.rounds = self.accepted = 0

    def answer(self, request: DecodeRequest) -> list[int]:
        return self._saved.answer(tuple(request.prompt), request.sampling.max_tokens)

    def watch(self, index: int, text: list[int], rest: list[int]) -> None:
        steps = self.nodes - 1
        drafts = self._relay.draft.draft_topk_ids[self.batch.requests[index].row]
        if not rest:
            return
        expected = self._saved.drafts(text, steps)
        assert drafts.tolist()[: len(rest)] == expected[: len(rest)], f"after {len(text)} tokens"
        for step, right in enumerate(rest[:steps]):
            if self._random.random() < HIT:
                drafts[step] = right
        wrong = [step for step, right in enumerate(rest[:steps]) if drafts[step] != right]
        self.rounds += 1
        self.accepted += min([*wrong, len(rest[:steps])])


# the form, the number of its modules, and how many of them are used
CASES = [
    ("deepseek-names-llama", 3, 3),
    ("mimo", 2, 2),
    ("glm-4.5", 3, 2),
    ("qwen3-next", 2, 2),
    ("qwen3-next", 3, 2),
    ("qwen3.5-moe-nested", 3, 3),
    ("mimo-v2", 3, 3),
]


@pytest.mark.parametrize(("name", "count", "steps"), CASES)
def test_every_module_drafts_its_step(name: str, count: int, steps: int, tmp_path: Path) -> None:
    """In chunks, after prefix hits, in graphs and above the largest one; the accept length is the reference's."""
    saved = save(PUBLISHED[name], tmp_path, count)
    draft = Modules(saved, steps)
    compared: list[Compared] = []

    def drafter(bench: Bench) -> Compared:
        runner = bench.parts.draft
        assert isinstance(runner, MtpRunner)
        width = DraftExtendInput.hidden_size_for(draft.config)
        compared.append(Compared(MtpDrafter(runner, bench.rounds, width), bench, saved))
        return compared[-1]

    has_state = draft.target.config.gated_delta is not None
    shape = Shape(
        model=draft.target.config,
        target=draft.target,
        draft=draft,
        step=speculative(drafter, buckets=(2,)),
        completion=ONE_BEHIND,
        round_tokens=steps + 1,
        chunk_tokens=64 if has_state else 7,
        page_size=16 if has_state else 4,
        prefill_snapshots=4,
    )
    lengths = (150, 65, 3) if has_state else (30, 17, 1)
    with NodeCluster(shape) as cluster:
        for _ in range(2):
            calls = [cluster.submit(LONG[:length], 9) for length in lengths]
            cluster.run()
            assert [call.ids for call in calls] == [saved.answer(tuple(call.prompt), 9) for call in calls]
        cluster.settle()
        counters = cluster.decode.link.counters
        assert cluster.prefill.link.counters.cached_tokens > 0
        assert counters.spec_drafts == compared[0].rounds
        assert counters.spec_accepted_tokens == compared[0].accepted > counters.spec_drafts / 2
