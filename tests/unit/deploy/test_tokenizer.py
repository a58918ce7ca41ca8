"""The tokenizer and the chat template: one id per word in every position, one rendering everywhere."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import jinja2
import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from deploy.tiny_models import tokenizer as family
from deploy.tiny_models.corpus import Document, DocumentSource
from deploy.tiny_models.prompts import chat_messages, few_shot_prompt
from deploy.tiny_models.templates import NAMES, OBJECTS
from deploy.tiny_models.word_problems import problems, take


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    family.write(family.build(), path)
    (path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return path


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Tokenizer:
    return Tokenizer.from_file(str(directory / "tokenizer.json"))


@pytest.fixture(scope="module")
def hugging_face(directory: Path) -> Any:
    return AutoTokenizer.from_pretrained(directory)


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


def render(messages: list[dict[str, Any]], add_generation_prompt: bool) -> str:
    """Render with plain jinja2, without the options that transformers sets."""

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    template = jinja2.Environment().from_string(family.CHAT_TEMPLATE)
    return template.render(
        messages=messages, add_generation_prompt=add_generation_prompt, raise_exception=raise_exception
    )


def test_the_size_and_the_special_ids(tokenizer: Tokenizer) -> None:
    assert tokenizer.get_vocab_size() == family.VOCAB_SIZE <= 768
    assert [tokenizer.token_to_id(text) for text in family.SPECIALS] == list(range(len(family.SPECIALS)))


@pytest.mark.parametrize(
    "text", ["3 + 4 = 7\n#### 7", "Grüße, 世界 🙂", "  two  spaces\t\r\n", "\x00\x7f", ""]
)
def test_any_text_round_trips(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(ids_of(tokenizer, text)) == text


def test_problems_round_trip(tokenizer: Tokenizer) -> None:
    for problem in islice(problems(1, "heldout"), 100):
        text = few_shot_prompt([problem], problem.question)
        assert tokenizer.decode(ids_of(tokenizer, text)) == text


def test_building_is_deterministic(tokenizer: Tokenizer) -> None:
    assert json.loads(family.build().to_str()) == json.loads(tokenizer.to_str())


@pytest.mark.parametrize("word", NAMES + OBJECTS)
def test_words_are_one_token_after_a_space(tokenizer: Tokenizer, word: str) -> None:
    assert len(ids_of(tokenizer, f" {word}")) == 1


def test_a_word_has_the_same_id_in_every_place(tokenizer: Tokenizer) -> None:
    """A name has the same id at the start of a message or document as inside a sentence."""
    names = {name: ids_of(tokenizer, f" {name}")[0] for name in NAMES}
    for problem in take(200, 1, "heldout"):
        chat = render(chat_messages([problem], problem.question), True)
        for text in (chat, few_shot_prompt([problem], problem.question)):
            ids = ids_of(tokenizer, text)
            for name, token in names.items():
                assert ids.count(token) == text.count(name)


def test_each_digit_is_a_token(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode(" 199", add_special_tokens=False).tokens == ["Ġ", "1", "9", "9"]


def test_plain_encoding_begins_with_bos(tokenizer: Tokenizer, hugging_face: Any) -> None:
    expected = [tokenizer.token_to_id(family.BOS), *ids_of(tokenizer, "Question: 1")]
    assert tokenizer.encode("Question: 1").ids == expected
    assert hugging_face("Question: 1")["input_ids"] == expected


def test_hugging_face_reads_the_special_tokens(hugging_face: Any) -> None:
    assert hugging_face.eos_token == family.END
    assert hugging_face.bos_token == family.BOS
    assert hugging_face.pad_token == family.PAD


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("shots", [0, 1, 3])
@pytest.mark.parametrize("system", [None, "Be short and exact."])
def test_plain_jinja_and_hugging_face_give_the_same_ids(
    tokenizer: Tokenizer, hugging_face: Any, add_generation_prompt: bool, shots: int, system: str | None
) -> None:
    *shown, problem = take(shots + 1, 2, "heldout")
    messages = chat_messages(shown, problem.question, system)
    theirs = hugging_face.apply_chat_template(
        messages, add_generation_prompt=add_generation_prompt, return_dict=False
    )
    assert ids_of(tokenizer, render(messages, add_generation_prompt)) == theirs


def test_the_rendering() -> None:
    messages = [{"role": "user", "content": " Hi \n"}, {"role": "assistant", "content": " 1 + 1 = 2"}]
    expected = "<|bos|><|user|> Hi<|end|>\n<|assistant|> 1 + 1 = 2<|end|>\n"
    assert render(messages, False) == expected
    assert render(messages, True) == f"{expected}<|assistant|>"


def test_an_answer_sent_back_has_the_ids_it_was_generated_as(tokenizer: Tokenizer) -> None:
    first, second = take(2, 3, "heldout")
    prompt = render(chat_messages([], first.question), True)
    generated = f" {first.answer}{family.END}"
    next_prompt = render(chat_messages([first], second.question), True)
    before = ids_of(tokenizer, prompt) + ids_of(tokenizer, generated)
    assert ids_of(tokenizer, next_prompt)[: len(before)] == before


def test_content_parts_are_joined(hugging_face: Any) -> None:
    parts = [{"type": "text", "text": "How "}, {"type": "text", "text": "many?"}]
    expected = "<|bos|><|user|> How many?<|end|>\n<|assistant|>"
    messages: list[dict[str, Any]] = [{"role": "user", "content": parts}]
    assert render(messages, True) == expected
    assert hugging_face.apply_chat_template(messages, add_generation_prompt=True, tokenize=False) == expected


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        ({"role": "tool", "content": "x"}, "unknown role tool"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "reads text only"),
    ],
)
def test_what_the_template_cannot_say_is_an_error(
    hugging_face: Any, message: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(jinja2.TemplateError, match=complaint):
        render([message], True)
    with pytest.raises(jinja2.TemplateError, match=complaint):
        hugging_face.apply_chat_template([message], tokenize=False)


def test_training_documents_are_what_servers_tokenise(tokenizer: Tokenizer) -> None:
    """The corpus joins ids of pieces; encoding the whole text must give the same ids."""
    source = DocumentSource(tokenizer, seed=1)
    for _ in range(20):
        documents: list[Document] = [
            source.chat(3, 2),
            source.chat(1, 0),
            source.few_shot(3),
            source.drill(8),
        ]
        for ids, weights in documents:
            assert len(ids) == len(weights)
            assert ids_of(tokenizer, tokenizer.decode(ids, skip_special_tokens=False)) == ids


def test_training_chats_are_what_the_template_renders(tokenizer: Tokenizer) -> None:
    source = DocumentSource(tokenizer, seed=1)
    shown = list(islice(problems(1, "train"), 2))
    ids, _ = source.chat(turns=2, system_sentences=0)
    messages = chat_messages(shown, "?")[:-1]
    assert ids == ids_of(tokenizer, render(messages, False))
