"""A Qwen2.5-VL checkpoint through a prefill node's step, compared with transformers: logits at every position."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

from common.checkpoint.model_config import ModelConfig
from common.engine.attention.step_attention import StepAttention
from common.engine.forward.batch import CaptureHiddenMode, ForwardMode
from common.engine.forward.model_runner import ModelRunner, load_model
from common.engine.forward.rotary_places import rotary_places
from common.engine.layers.placement import Placement
from common.kv_cache.page_space import PageSpace, as_keys
from common.kv_cache.radix_cache import NoPrefixCache, RadixCache
from common.messages.generation import ImageSpan, SamplingParams
from prefill_node.host_batch import HostBatch
from prefill_node.pixel_reader import load_pixel_reader
from prefill_node.planner import prompt_plan
from prefill_node.prompt_images import PendingImage, PromptImages, RowCache
from prefill_node.request import PrefillRequest
from prefill_node.scheduler import Chunk
from prefill_node.step_rules import PromptRules
from prefill_node.vision import VisionEmbeds
from prefill_node.vision_stage import load_vision
from tests.fakes.pools import model_pool
from tests.fakes.qwen_vl import IMAGE, as_png, build, picture, reference_logits, save

CPU = Placement(torch.float32, torch.device("cpu"))
PAGE = 4
TOLERANCE = 1e-4
Part = int | tuple[int, int]  # a token, or the size of an image in pixels

TEXT: tuple[Part, ...] = (5, 9, 40, 41, 42, 3, 7)
ONE: tuple[Part, ...] = (5, 9, 88, (40, 24), 89, 30, 31, 32)
MANY: tuple[Part, ...] = (5, 88, (9, 9), 89, 60, 88, (33, 47), 89, 61, 88, (100, 20), 89, 62, 63)
FIRST: tuple[Part, ...] = ((48, 40), 89, 70, 71)


@dataclass
class Prompt:
    request: PrefillRequest
    pictures: list[Image.Image]

    @property
    def ids(self) -> list[int]:
        return self.request.keys.tolist()


class Rig:
    """The parts of a node that a prompt's forward runs through, with a prefix cache unless the model keeps states."""

    def __init__(self, model: Any, path: Path) -> None:
        self.reference = model
        self.config = ModelConfig.load(path)
        assert self.config.vision is not None
        self.vision = self.config.vision
        self.read = load_pixel_reader(path, self.vision, 1_000_000)
        loaded, _ = load_model(path, "float32")
        self.loaded = loaded
        pool = model_pool(self.config, PAGE, 80, CPU, num_slots=8)
        self.runner = ModelRunner(loaded, pool, StepAttention(pool, self.config.sliding_windows))
        self.images = PromptImages()
        self.embeds = VisionEmbeds(
            loaded.embed, load_vision(path, self.config, CPU), RowCache(1 << 20), self.images
        )
        self.rooms = itertools.count(1)
        slots = pool.layout.num_slots
        self.space = PageSpace(PAGE, 80, NoPrefixCache() if slots else RadixCache(PAGE), num_slots=slots)
        self.rotary = rotary_places(self.config.rope)

    def prompt(self, parts: Sequence[Part]) -> Prompt:
        ids: list[int] = []
        images, pictures = [], []
        for part in parts:
            if isinstance(part, int):
                ids.append(part)
                continue
            rows, columns = self.vision.grid(*part)
            pictures.append(picture(*part))
            span = ImageSpan(len(ids), rows * columns, bytes([*part, *bytes(30)]), rows)
            images.append(PendingImage(span, self.read(as_png(pictures[-1]))))
            ids += [IMAGE] * (rows * columns)
        greedy = SamplingParams(max_tokens=1, temperature=0.0)
        room, spans = next(self.rooms), tuple(image.span for image in images)
        self.images.add(room, images)
        request = PrefillRequest(room, "", as_keys(ids), 0, greedy, "", 0.0, images=spans)
        keys = self.space.keys(request.contents)
        request.lease = self.space.lease(keys, -(-(len(ids) + 8) // PAGE), max_cached_tokens=len(ids) - 1)
        assert request.lease is not None
        request.scheduled = request.lease.cached_tokens
        return Prompt(request, pictures)

    def logits(self, prompts: Sequence[Prompt], chunk: int) -> list[Tensor]:
        """Return each prompt's logits after its cached prefix; all share forwards of `chunk` tokens of each."""
        found: list[list[Tensor]] = [[] for _ in prompts]
        while any(prompt.request.remaining for prompt in prompts):
            live = [index for index, prompt in enumerate(prompts) if prompt.request.remaining]
            chunks = []
            for index in live:
                request = prompts[index].request
                chunks.append(Chunk(request, request.scheduled, min(chunk, request.remaining)))
                request.scheduled += chunks[-1].length
            planned = prompt_plan(chunks, PAGE, PromptRules(), 1).chunks
            host = HostBatch.of(planned, PAGE, self.rotary)
            sent = [torch.from_numpy(array) for array in host.arrays]
            batch = host.on_device(sent, CaptureHiddenMode.NULL)
            batch.logits_rows = torch.arange(len(batch.input_ids))
            merged = self.embeds(planned, batch)
            output = self.runner(batch, None if merged is None else merged.rows)
            for index, part in zip(live, output.logits.split([each.length for each in chunks]), strict=True):
                found[index].append(part)
        return [torch.cat(parts) for parts in found]

    def check(self, prompts: Sequence[Prompt], logits: Sequence[Tensor]) -> None:
        for prompt, ours in zip(prompts, logits, strict=True):
            theirs = reference_logits(self.reference, prompt.ids, prompt.pictures)[-len(ours) :]
            assert theirs.std() > 0.5
            torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=0)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    model = build()
    return model, save(model, tmp_path_factory.mktemp("qwen"))


@pytest.fixture
def rig(saved: tuple[Any, Path]) -> Rig:
    return Rig(*saved)


@pytest.mark.parametrize("chunk", [1, 5, 64])
def test_logits_of_any_batch_in_any_chunks(rig: Rig, chunk: int) -> None:
    """Text, one image, several of different sizes and an image first share the same forwards, split anywhere."""
    prompts = [rig.prompt(parts) for parts in (TEXT, ONE, MANY, FIRST)]
    rig.check(prompts, rig.logits(prompts, chunk))


def test_logits_after_a_cached_prefix(rig: Rig) -> None:
    """One hit ends inside an image, another after all of them."""
    first = rig.prompt(MANY)
    rig.logits([first], 64)
    assert first.request.lease is not None
    first.request.lease.commit(rig.space.keys(first.request.contents))
    assert isinstance(MANY[6], tuple)
    cut: tuple[Part, ...] = (*MANY[:7], 80, 81)
    for parts in (cut, (*MANY[:-1], 77, 78)):
        prompt = rig.prompt(parts)
        assert prompt.request.lease is not None
        assert prompt.request.lease.cached_tokens > 10
        rig.check([prompt], rig.logits([prompt], 64))


def test_logits_after_the_prompt(rig: Rig) -> None:
    """Positions are those with which a decode node continues: the token's place plus the request's delta."""
    prompt = rig.prompt(MANY)
    rig.logits([prompt], 64)
    spans, start = prompt.request.images, prompt.request.num_tokens
    assert rig.rotary.delta(spans) < 0
    said = [20, 21, 22, 23]
    assert prompt.request.lease is not None
    pages = torch.tensor([prompt.request.lease.pages], dtype=torch.int32)
    ours = []
    for place, token in enumerate(said, start):
        chunk = Chunk(replace_keys(prompt.request, [*prompt.ids, *said]), place, 1)
        host = HostBatch.of(prompt_plan([chunk], PAGE, PromptRules(), 1).chunks, PAGE, rig.rotary)
        batch = host.on_device([torch.from_numpy(array) for array in host.arrays], CaptureHiddenMode.NULL)
        batch.mode, batch.page_table = ForwardMode.DECODE, pages
        batch.positions = torch.tensor([place + rig.rotary.delta(spans)])
        batch.input_ids, batch.logits_rows = torch.tensor([token]), torch.tensor([0])
        ours.append(rig.runner(batch).logits)
    theirs = reference_logits(rig.reference, [*prompt.ids, *said], prompt.pictures)[start:]
    torch.testing.assert_close(torch.cat(ours), theirs, atol=TOLERANCE, rtol=0)


def replace_keys(request: PrefillRequest, ids: Sequence[int]) -> PrefillRequest:
    return replace(request, keys=as_keys(ids))
