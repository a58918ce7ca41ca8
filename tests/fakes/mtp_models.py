"""Random MTP modules for the tiny target, as used in nodes, and a plain recomputation of their drafts."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from common.checkpoint.aux_layers import AuxLayers
from common.checkpoint.draft_config import DraftConfig, with_steps
from common.checkpoint.mtp_format import MtpFormat
from common.engine.attention.paged import PagedAttention
from common.engine.forward.draft_inputs import DraftExtendInput
from common.engine.forward.mtp_runner import MtpRunner
from common.engine.models.mtp import MtpModules, build_mtp
from common.messages.generation import SamplingParams
from common.node.loaded_draft import ModulesDraft
from common.node.serving_draft import ServingDraft, draft_shape
from decode_node.speculative.drafters.mtp import MtpDrafter
from prefill_node.step_plan import FirstDraw, PlannedChunk
from tests.fakes.draft_models import Watched
from tests.fakes.drafters import Bench, speculative
from tests.fakes.node_cluster import MakeStep, NoDraftModel
from tests.fakes.pools import plain_pool
from tests.fakes.tiny_model import CONFIG, MAX_LEN, PLACEMENT, hidden_states, one_page, tiny_model

SHIPPED = Path(__file__).resolve().parents[2] / "deploy" / "tiny_models" / "tiny-mtp"
MODULES = 5
FORMAT = MtpFormat(
    "model.layers", 2, "enorm", "hnorm", "eh_proj", "shared_head.norm", embedding_first=True, chain=True
)
FORMATS = {"mtp": FORMAT, "mtp-no-chain": replace(FORMAT, embedding_first=False, chain=False)}


# modules of another width than the target's
NARROW = {f"{name}-narrow": form for name, form in FORMATS.items()}


def mtp_config(name: str, steps: int) -> DraftConfig:
    width = 24 if name in NARROW else CONFIG.hidden_size
    model = replace(CONFIG, num_layers=MODULES, sliding_windows=(None,) * MODULES, hidden_size=width)
    form = (FORMATS | NARROW)[name]
    return with_steps(DraftConfig("mtp", model, CONFIG.hidden_size, AuxLayers(), None, False, form), steps)


@functools.cache
def mtp_modules(name: str, steps: int) -> MtpModules:
    """Build modules. The first ones are the same for every number of steps."""
    target = tiny_model()
    model = build_mtp(mtp_config(name, steps), target, PLACEMENT).eval()
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for head in model.heads:
            for piece in head.pieces():
                key, tensor = piece.name, piece.into
                tensor.normal_(std=0.3, generator=generator)
                if "norm" in key:
                    tensor.add_(1.0)
    return model


def first_modules(directory: Path, modules: int) -> Path:
    """Write the shipped draft with only this many modules to a new directory; most published checkpoints have one."""
    directory.mkdir()
    config = json.loads((SHIPPED / "config.json").read_text())
    first = config["num_hidden_layers"]
    kept = tuple(f"model.layers.{first + index}." for index in range(modules))
    tensors = load_file(SHIPPED / "model.safetensors")
    save_file(
        {name: value for name, value in tensors.items() if name.startswith(kept)},
        directory / "model.safetensors",
    )
    (directory / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": modules}))
    return directory


class MtpModel(NoDraftModel):
    """A draft model of MTP modules."""

    algorithm = "mtp"

    def __init__(self, name: str, steps: int) -> None:
        self.name, self.steps = name, steps
        self.config = mtp_config(name, steps)

    def serving(self) -> ServingDraft:
        loaded = ModulesDraft(mtp_modules(self.name, self.steps), repeats=False)
        return ServingDraft(loaded, self.config, self.name, draft_shape(self.config, 1, PLACEMENT))


@functools.lru_cache(maxsize=1024)
@torch.inference_mode()
def eager_rows(name: str, steps: int, text: tuple[int, ...]) -> tuple[list[int], list[torch.Tensor]]:
    """Compute drafts after `text`, whose last token the target has not read, and the KV of each module.

    All rows are computed at once, module by module. Rows that read a draft are meaningless.
    """
    rest = (CONFIG.head_dim, MAX_LEN, 2, PLACEMENT.dtype, PLACEMENT.device)
    pool = plain_pool(steps, CONFIG.num_kv_heads, *rest)
    runner = MtpRunner(mtp_modules(name, steps).heads, PagedAttention(pool, (None,) * steps))
    known, hidden = list(text), hidden_states(list(text[:-1]))
    for step, module in enumerate(runner.modules):
        given = module.forward(one_page(known[1 + step : 1 + step + len(hidden)]), hidden)
        known.append(int(module.propose(torch.tensor([len(hidden) - 1]), given).draft_topk_ids))
        hidden = given.hidden
    planes = [plane(module)[1] for module in range(steps) for plane in (pool.key, pool.value)]
    return known[len(text) :], [plane[: len(text) - 1].clone() for plane in planes]


def observed(
    name: str, steps: int, hit: float, seen: list[Seen], buckets: Sequence[int] = ()
) -> tuple[NoDraftModel, MakeStep]:
    """Build a cluster's draft model and its decode step; the state at the start of every round is recorded in `seen`.

    Then the right draft replaces a wrong one with probability `hit`, as in `draft_models.observed`.
    """
    model = MtpModel(name, steps)
    return model, speculative(
        lambda bench: ObservedModules(_drafter(model, bench), bench, hit, seen), buckets=buckets
    )


def drafting(name: str, steps: int, buckets: Sequence[int] = ()) -> tuple[NoDraftModel, MakeStep]:
    model = MtpModel(name, steps)
    return model, speculative(lambda bench: _drafter(model, bench), buckets=buckets)


def whole_prompt(ids: Sequence[int]) -> PlannedChunk:
    """Return a prompt in one chunk, without cached tokens, for a prefill step without a node."""
    draw = FirstDraw(sampling=SamplingParams(max_tokens=1))
    text = np.asarray(ids, dtype=np.int64).tobytes()
    return PlannedChunk(key=1, start=0, end=len(ids), ids=text, pages=(1,), draw=draw)


def _drafter(model: MtpModel, bench: Bench) -> MtpDrafter:
    runner = bench.parts.draft
    assert isinstance(runner, MtpRunner)
    return MtpDrafter(runner, bench.rounds, DraftExtendInput.hidden_size_for(model.config))


@dataclass(frozen=True)
class Seen:
    """One request at the start of a round."""

    text: list[int]
    drafts: list[int]  # those that can be emitted
    planes: torch.Tensor  # keys and values of each module, [2 * modules, positions, heads, D]


class ObservedModules(Watched):
    """The drafter of `observed`. The proposal stays in the relay row until verify reads it."""

    def __init__(self, inner: MtpDrafter, bench: Bench, hit: float, seen: list[Seen]) -> None:
        super().__init__(inner, bench)
        self._hit = hit
        self._seen = seen
        self._random = random.Random(3)

    def watch(self, index: int, text: list[int], rest: list[int]) -> None:
        request = self.batch.requests[index]
        drafts = self._relay.draft.draft_topk_ids[request.row]
        assert not self._relay.draft.hidden[0].any(), "padding has stored hidden states"
        if rest:  # past the end there are no pages and no draft that could be emitted
            planes = self.draft_kv(index, len(text) - 1)
            self._seen.append(Seen(text, drafts.tolist()[: len(rest)], planes))
        for step, right in enumerate(rest[: self.nodes - 1]):
            if self._random.random() < self._hit:
                drafts[step] = right


def expect_eager(name: str, steps: int, seen: Seen) -> None:
    """Expect the reference drafts, and the reference KV of each module at all positions that have not read a draft."""
    drafts, planes = eager_rows(name, steps, tuple(seen.text))
    known = len(seen.text) - 1
    assert seen.drafts == drafts[: len(seen.drafts)], f"after {known} tokens"
    for index, (found, wanted) in enumerate(zip(seen.planes, planes, strict=True)):
        count = max(known - index // 2, 0)
        difference = (found[:count] - wanted[:count]).abs().amax((1, 2)) > 1e-4
        wrong = difference.nonzero().flatten().tolist()
        assert not wrong, f"KV of module {index // 2} at {wrong} of {known} tokens"
