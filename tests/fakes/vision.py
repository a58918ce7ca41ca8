"""A scripted vision part for the tiny target: images are numbers that determine their pixels and rows."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import zmq
from torch import Tensor

from common.checkpoint.model_config import ModelConfig
from common.engine.attention.paged import PagedAttention
from common.engine.forward.batch import CaptureHiddenMode, ForwardBatch, ForwardMode
from common.engine.forward.model_runner import ModelRunner
from common.engine.models.causal_lm import CausalLM
from common.engine.models.vision_part import Pixels
from common.errors import InvalidRequest
from common.ipc import Dealer, RouterSocket
from common.messages.generation import ImageSpan
from common.messages.image_inbox import ImageData, salted_digest
from common.messages.wire import encode
from common.observability.logs import Log
from decode_node.request import DecodeRequest
from decode_node.speculative.drafters.drafter import Drafter
from prefill_node.image_intake import ImageIntake
from prefill_node.prompt_images import PromptImages, RowCache
from prefill_node.vision import VisionEmbeds
from prefill_node.vision_stage import VisionStage
from tests.fakes.draft_models import CONFIGS, DraftModel, Observed, drafter, tiny_draft
from tests.fakes.drafters import Bench, speculative
from tests.fakes.node_cluster import MakeStep, NoDraftModel
from tests.fakes.pools import model_pool, plain_pool
from tests.fakes.tiny_model import CONFIG, MAX_LEN, PLACEMENT, tiny_model
from tests.fakes.waiting import until

TOKENS = 5  # rows of an image with a number below 100, in one line
GRIDS = ((2, 3), (4, 1), (3, 3), (1, 6))  # for images with larger numbers, in turn
MAX_TOKENS = 9  # largest number of tokens of an image
PIXELS = (3, 2, 2)


def file_of(number: int) -> bytes:
    """Return the file of image `number`."""
    return f"image {number}".encode()


def digest_of(number: int) -> bytes:
    return hashlib.sha256(file_of(number)).digest()


def grid_of(number: int) -> tuple[int, int]:
    """Return (rows, columns) of an image's tokens."""
    return (1, TOKENS) if number < 100 else GRIDS[number % len(GRIDS)]


def read(data: bytes) -> Pixels:
    """Read the pixels of a file, as a PixelReader does. An image with a negative number is invalid."""
    number = int(data.removeprefix(b"image "))
    if number < 0:
        raise InvalidRequest("the image is damaged")
    values = torch.rand(PIXELS, generator=torch.Generator().manual_seed(number))
    return Pixels(values, *grid_of(number))


@functools.cache
def _weights() -> Tensor:
    generator = torch.Generator().manual_seed(4)
    return torch.randn(12, MAX_TOKENS * CONFIG.hidden_size, generator=generator)


class TinyPart:
    """A VisionPart that counts its forwards."""

    def __init__(self) -> None:
        self.forwards: list[int] = []  # number of images in each

    def __call__(self, images: Sequence[Pixels]) -> list[Tensor]:
        self.forwards.append(len(images))
        every = [(each.values.flatten() @ _weights()).view(MAX_TOKENS, CONFIG.hidden_size) for each in images]
        return [
            rows[: each.tokens].view(each.rows, each.columns, -1)
            for each, rows in zip(images, every, strict=True)
        ]

    def examples(self) -> Sequence[Sequence[Pixels]]:
        return [[read(file_of(1))], [read(file_of(100)), read(file_of(101))]]


def rows_of(number: int) -> Tensor:
    return TinyPart()([read(file_of(number))])[0].flatten(0, 1)


class DecodedIntake(ImageIntake):
    """Returns from `receive` when its threads have decoded what has arrived.

    A NodeCluster counts the turns in which its nodes wait, which says nothing about how late a thread runs.
    """

    def receive(self) -> None:
        super().receive()
        until(lambda: not self.busy)


class TinyVision:
    """Makes the vision stage of every prefill node of a NodeCluster, and sends images to all of them."""

    def __init__(
        self,
        cache_bytes: int = 1 << 20,
        reader: Callable[[bytes], Pixels] = read,
        make_intake: type[ImageIntake] = DecodedIntake,
    ) -> None:
        self.cache_bytes = cache_bytes
        self.reader = reader
        self.make_intake = make_intake
        self.caches: list[RowCache] = []
        self.sockets: list[RouterSocket] = []
        self.embeds: list[VisionEmbeds] = []
        self.parts: list[TinyPart] = []
        self.intakes: list[ImageIntake] = []
        self.prompts: list[PromptImages] = []

    def __call__(self, context: zmq.Context[zmq.Socket[bytes]], model: CausalLM) -> VisionStage:
        address = f"inproc://images-{len(self.sockets)}"
        socket = RouterSocket(context, address)
        dealer = Dealer(context, address, b"p/images")
        until(lambda: socket.drain() or socket.reachable(b"p/images"))
        cache, prompts = RowCache(self.cache_bytes), PromptImages()
        intake = self.make_intake([dealer], self.reader, cache, prompts, Log("images"))
        part = TinyPart()
        embeds = VisionEmbeds(model.embed, part, cache, prompts)
        self.caches.append(cache)
        self.prompts.append(prompts)
        self.parts.append(part)
        self.sockets.append(socket)
        self.intakes.append(intake)
        self.embeds.append(embeds)
        return VisionStage(intake, embeds)

    def send(self, *numbers: int, salt: bytes = b"") -> None:
        for socket in self.sockets:
            for number in numbers:
                digest = salted_digest(digest_of(number), salt)
                image = ImageData(digest=digest, data=file_of(number), salt=salt)
                assert socket.send(b"p/images", encode(image))

    def close(self) -> None:
        for intake, socket in zip(self.intakes, self.sockets, strict=True):
            intake.close()
            socket.close()


Part = int | tuple[int]  # a token id, or an image
Seen = list[tuple[tuple[Part, ...], list[int], list[int]]]  # (prompt, its answer so far, drafts after that)


def prompt_of(parts: Sequence[Part], filler: int = 0) -> tuple[list[int], tuple[ImageSpan, ...]]:
    """Return token ids with `filler` at the positions of images, and the spans of the images."""
    ids: list[int] = []
    spans: list[ImageSpan] = []
    for part in parts:
        if isinstance(part, tuple):
            rows, columns = grid_of(part[0])
            spans.append(ImageSpan(len(ids), rows * columns, digest_of(part[0]), rows))
            ids += [filler] * (rows * columns)
        else:
            ids.append(part)
    return ids, tuple(spans)


def places_of(parts: Sequence[Part], config: ModelConfig) -> Tensor | None:
    """Return the positions [T, 3] of a prompt by transformers' rule, written as it reads there; None for one axis."""
    if not config.rope.sections:
        return None
    found: list[tuple[int, int, int]] = []
    for part in parts:
        next_one = max((max(each) for each in found), default=-1) + 1
        if isinstance(part, tuple):
            rows, columns = grid_of(part[0])
            found += [
                (next_one, next_one + row, next_one + column)
                for row in range(rows)
                for column in range(columns)
            ]
        else:
            found.append((next_one,) * 3)
    return torch.tensor(found)


def embeddings(parts: Sequence[Part], answer: Sequence[int] = ()) -> Tensor:
    """Return the target's input [T, H], assembled one row at a time."""
    model = tiny_model()
    rows = [
        rows_of(part[0]) if isinstance(part, tuple) else model.embed(torch.tensor([part]))
        for part in [*parts, *answer]
    ]
    return torch.cat(rows)


@functools.cache
@torch.inference_mode()
def greedy(parts: tuple[Part, ...], count: int, config: ModelConfig = CONFIG) -> list[int]:
    """Generate greedily as the reference: recompute everything for each token, without cache, chunks or graphs."""
    answer: list[int] = []
    for _ in range(count):
        embeds = embeddings(parts, answer)
        pool = model_pool(CONFIG, MAX_LEN, 2, PLACEMENT)
        runner = ModelRunner(tiny_model(config=config), pool, PagedAttention(pool, CONFIG.sliding_windows))
        batch = one_prompt(len(embeds), places_of([*parts, *answer], config))
        answer.append(int(runner(batch, embeds).logits[-1].argmax()))
    return answer


@torch.inference_mode()
def eager_drafts(name: str, parts: Sequence[Part], told: Sequence[int], steps: int) -> list[int]:
    """Return the head's drafts after the prompt and `told`, whose last token the target has not read."""
    config, head = CONFIGS[name], tiny_draft(name)
    embeds = embeddings(parts, told)
    pool = model_pool(CONFIG, MAX_LEN, 2, PLACEMENT)
    target = ModelRunner(
        tiny_model(aux=config.aux_layers, config=replace(CONFIG, rope=config.model.rope)),
        pool,
        PagedAttention(pool, CONFIG.sliding_windows),
    )
    text = [*parts, *told]
    places = places_of(text, config.model)
    known_places = None if places is None else places[:-1]
    aux = target(one_prompt(len(embeds) - 1, known_places), embeds[:-1]).hidden
    assert aux is not None
    hidden, known, drafts = head.project(aux), embeds[1:], list[int]()
    layers = DraftModel(name).layers
    while len(drafts) < steps:
        draft_pool = plain_pool(
            layers, CONFIG.num_kv_heads, CONFIG.head_dim, MAX_LEN, 2, PLACEMENT.dtype, PLACEMENT.device
        )
        attention = PagedAttention(draft_pool, (None,) * layers)
        places = places_of([*text, *drafts], config.model)
        batch = one_prompt(len(known), None if places is None else places[:-1])
        attention.plan(batch)
        output = head.body(known, hidden, batch.positions, attention)
        best = head.compute_logits(output.last[-1:])[0].argmax()
        drafts.append(int(head.target_ids(best)))
        hidden = torch.cat((hidden, output.hidden[-1:]))
        known = torch.cat((known, tiny_model().embed(torch.tensor(drafts[-1:]))))
    return drafts


class Prompts:
    """Maps what nodes see of prompts back to the prompts of a test."""

    def __init__(self, *prompts: tuple[Part, ...], filler: int = 0) -> None:
        self._known = {
            (tuple(ids), spans): each for each in prompts for ids, spans in [prompt_of(each, filler)]
        }

    def of(self, request: DecodeRequest) -> tuple[Part, ...]:
        return self._known[tuple(request.prompt), tuple(request.images)]


class ObservedVision(Observed):
    """The drafter of `observed` for prompts with images."""

    def __init__(self, inner: Drafter, bench: Bench, hit: float, prompts: Prompts, noted: Seen) -> None:
        super().__init__(inner, bench, hit, [])
        self._config = bench.parts.runner.model.config
        self._prompts = prompts
        self._noted = noted

    def answer(self, request: DecodeRequest) -> list[int]:
        return greedy(self._prompts.of(request), request.sampling.max_tokens, self._config)

    def watch(self, index: int, text: list[int], rest: list[int]) -> None:
        request = self.batch.requests[index]
        told = text[len(request.prompt) :]
        if rest:
            drafts = self.state.tree.tokens[index, 1:].tolist()[: len(rest)]
            self._noted.append((self._prompts.of(request), told, drafts))
        super().watch(index, text, rest)


def observed_vision(
    name: str, steps: int, hit: float, prompts: Prompts, noted: Seen, buckets: Sequence[int] = ()
) -> tuple[NoDraftModel, MakeStep]:
    """Return a cluster's draft model and its decode step."""
    model = DraftModel(name)
    make = lambda bench: ObservedVision(drafter(model, bench, steps), bench, hit, prompts, noted)  # noqa: E731
    return model, speculative(make, buckets=buckets)


def one_prompt(tokens: int, positions: Tensor | None = None) -> ForwardBatch:
    arange = torch.arange(tokens)
    return ForwardBatch(
        mode=ForwardMode.EXTEND,
        input_ids=torch.zeros(tokens, dtype=torch.int64),
        positions=arange if positions is None else positions,
        kv_slots=arange + MAX_LEN,
        page_table=torch.ones(1, 1, dtype=torch.int32),
        seq_lens=torch.tensor([tokens], dtype=torch.int32),
        query_start=torch.tensor([0, tokens], dtype=torch.int32),
        logits_rows=torch.tensor([tokens - 1]),
        max_seq_len=tokens,
        hidden_mode=CaptureHiddenMode.FULL,
        query_lens_host=(tokens,),
        seq_lens_host=(tokens,),
    )
