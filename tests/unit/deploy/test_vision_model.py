"""The checked-in vision model: a standard LLaVA directory, its questions, its score by transformers, its draft."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer
from transformers import AutoProcessor, LlavaForConditionalGeneration

from deploy.tiny_models import tokenizer as family
from deploy.tiny_models.drafts import files
from deploy.tiny_models.vision import checkpoint, measure
from deploy.tiny_models.vision.batches import Sampler, merged_embeddings, normalized
from deploy.tiny_models.vision.digits import LEVELS, digits
from deploy.tiny_models.vision.examples import make, prompt
from deploy.tiny_models.vision.questions import Question, facts, is_right, questions
from deploy.tiny_models.vision.trainer import vision_optimizers

MODELS = Path(__file__).parents[3] / "deploy" / "tiny_models"
TARGET, DRAFT = MODELS / "tiny-vision", MODELS / "tiny-vision-eagle3"


@pytest.fixture(scope="module")
def model() -> LlavaForConditionalGeneration:
    found = LlavaForConditionalGeneration.from_pretrained(TARGET, dtype=torch.float32)
    return found.requires_grad_(False).train(False)


def test_digits_are_whole_and_no_digit_is_in_both_splits() -> None:
    train, held_out = digits("train"), digits("heldout")
    assert len(train.labels) + len(held_out.labels) == 1797
    assert 250 < len(held_out.labels) < 450
    assert set(held_out.labels.tolist()) == set(range(10))
    assert train.ink.max() == LEVELS
    assert not {each.tobytes() for each in train.ink} & {each.tobytes() for each in held_out.ink}


def test_questions_are_reproducible_and_answers_score_themselves() -> None:
    first, again = (list(islice(questions(3, "heldout"), 60)) for _ in range(2))
    for one, other in zip(first, again, strict=True):
        assert (one.text, one.answer) == (other.text, other.answer)
        assert all(np.array_equal(a, b) for a, b in zip(one.images, other.images, strict=True))
        assert facts(one.answer)
        assert is_right(one, f" {one.answer}<|end|>")
        assert not is_right(one, one.answer + " 5")
    assert {len(one.images) for one in first} == {0, 1, 2}
    assert next(questions(4, "heldout")).text != next(questions(6, "heldout")).text


def test_the_processor_makes_the_prompt_and_the_pixels_that_training_used() -> None:
    """AutoProcessor reads the directory: the model was trained on what users of transformers will send."""
    processor = AutoProcessor.from_pretrained(TARGET)
    for question in islice(questions(5, "heldout"), 8):
        parts = [*({"type": "image"} for _ in question.images), {"type": "text", "text": question.text}]
        text = processor.apply_chat_template(
            [{"role": "user", "content": parts}], add_generation_prompt=True, tokenize=False
        )
        images = [Image.fromarray(each) for each in question.images]
        made = processor(text=text, images=images or None, return_tensors="pt", add_special_tokens=False)
        wanted = processor.tokenizer(prompt(question), add_special_tokens=False).input_ids
        assert made["input_ids"][0].tolist() == wanted
        if images:
            pixels = normalized(torch.from_numpy(np.stack(question.images)))
            assert (made["pixel_values"] - pixels).abs().max() < 1e-6


def test_held_out_questions_are_answered(model: LlavaForConditionalGeneration) -> None:
    """At least 0.9; the card has the score over 2,000 questions."""
    tokenizer = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    replies = list(measure.answers(model, tokenizer, list(islice(questions(77, "heldout"), 24))))
    assert measure.score(replies).value >= 0.9
    kind, head = files.load_head(DRAFT)
    assert kind == "eagle3"
    rows = list(measure.acceptance(head, model, replies[:8], (3,)))
    assert rows[0].suite == "pictures"
    assert rows[0].length > 3.5  # the most is 4; the card has the length over all questions
    card = (TARGET / "README.md").read_text()
    assert float(card.split("| **all** | 2000 | **")[1][:5]) >= 0.9


def test_a_draft_that_reads_placeholders_in_place_of_pictures_is_worse(
    model: LlavaForConditionalGeneration,
) -> None:
    """The head was trained on merged embeddings and needs them: its accept length depends on it."""
    tokenizer = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    asked = [each for each in islice(questions(78, "heldout"), 40) if each.kind == "describe"]
    replies = list(measure.answers(model, tokenizer, asked))
    _, head = files.load_head(DRAFT)
    blind = [measure.Reply(Question("", (), "", ""), each.asked, each.said, each.text) for each in replies]
    (with_pictures,) = measure.acceptance(head, model, replies, (3,))
    (without,) = measure.acceptance(head, model, blind, (3,))
    assert with_pictures.length > without.length + 0.5


def test_every_parameter_is_saved_under_a_published_name_and_trained_once(tmp_path: Path) -> None:
    vocabulary = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    config = checkpoint.llava_config(checkpoint.SMOKE_SHAPE, vocabulary)
    fresh = checkpoint.new_model(config, seed=1)
    given = [
        p for opt in vision_optimizers(fresh, 1e-3) for group in opt.param_groups for p in group["params"]
    ]
    assert len(given) == len({id(p) for p in given}) == len(list(fresh.parameters()))
    checkpoint.save(tmp_path, fresh, config, vocabulary)
    loaded = LlavaForConditionalGeneration.from_pretrained(tmp_path, dtype=torch.float32)
    for (name, wanted), found in zip(fresh.named_parameters(), loaded.parameters(), strict=True):
        assert torch.equal(wanted.bfloat16().float(), found), name


def test_a_batch_puts_each_picture_at_its_placeholders(model: LlavaForConditionalGeneration) -> None:
    vocabulary = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    examples = make(1, "train", 40, vocabulary.to_str())
    assert examples.num_images.sum() == len(examples.images)
    batch = next(iter(Sampler(examples, 12, torch.device("cpu"), seed=1)))
    image = vocabulary.token_to_id(family.IMAGE)
    assert image is not None
    placeholders = batch.ids.eq(image).sum(1)
    assert placeholders.tolist() == sorted(placeholders.tolist())
    assert placeholders.sum() == len(batch.pixels) * checkpoint.IMAGE_TOKENS
    merged = merged_embeddings(model, batch.ids, batch.pixels)
    alone = merged_embeddings(model, batch.ids[-1:], batch.pixels[-2:])
    assert (merged[-1] - alone[0]).abs().max() < 1e-4
