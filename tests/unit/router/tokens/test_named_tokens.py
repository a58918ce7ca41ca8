"""Special tokens that only tokenizer_config.json tells: ids are those of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import Tokenizer as HfTokenizer

from router.tokens.tokenizer import Tokenizer
from tests.unit.router.tokens.vocabularies import save

TEXT = "<s> the answer </s> is <|end|> END<|x y|>"
END = {"content": "<|end|>", "lstrip": False, "rstrip": True, "single_word": False, "normalized": False}
FREE = {"byte_level": 321, "llama2": 290}  # the first free id
CONFIGS: dict[str, dict[str, Any]] = {
    "none": {},
    "named": {"bos_token": "<s>", "eos_token": {"__type": "AddedToken", "content": "</s>"}},
    "listed": {"extra_special_tokens": ["</s>", "<s>"]},
    "older-list": {"additional_special_tokens": ["</s>"]},
    "named-by-model": {"image_token": "<s>", "extra_special_tokens": {"audio_token": "</s>"}},
    "numbered": {"added_tokens_decoder": {"FREE": {**END, "special": True}}},
    "numbered-and-named": {"added_tokens_decoder": {"FREE": END}, "eos_token": "<|end|>"},
}


def directory(folder: Path, kind: str, config: dict[str, Any]) -> Path:
    """Save a vocabulary with fewer added tokens: they are entries of the model like any other."""
    file = save(kind, folder) / "tokenizer.json"
    raw = json.loads(file.read_text())
    raw["added_tokens"] = [token for token in raw["added_tokens"] if token["content"] not in ("<s>", "</s>")]
    file.write_text(json.dumps(raw))
    (folder / "tokenizer_config.json").write_text(json.dumps(config).replace("FREE", str(FREE[kind])))
    return folder


@pytest.mark.parametrize("kind", ["byte_level", "llama2"])
@pytest.mark.parametrize("case", CONFIGS)
def test_ids_are_those_of_transformers(case: str, kind: str, tmp_path: Path) -> None:
    path = directory(tmp_path, kind, CONFIGS[case])
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(path)
    ours = Tokenizer(path)
    assert ours.vocab_size == len(theirs) == FREE[kind] + case.startswith("numbered")
    ids = ours.encode(TEXT, False)
    assert ids == theirs.encode(TEXT, add_special_tokens=False)
    assert ours.decode(ids, True) == theirs.decode(ids, skip_special_tokens=True)
    decoder = ours.stream(True)
    streamed = "".join(decoder.step(each) for each in ids) + decoder.flush()
    assert streamed == ours.decode(ids, True)


def test_a_text_of_a_special_token_was_cut_into_pieces(tmp_path: Path) -> None:
    plain = HfTokenizer.from_file(str(directory(tmp_path, "byte_level", {}) / "tokenizer.json"))
    end = plain.token_to_id("</s>")
    assert end not in plain.encode("a</s>").ids
    directory(tmp_path, "byte_level", CONFIGS["named"])
    assert Tokenizer(tmp_path).encode("a</s>", False)[-1] == end


def test_tokens_without_an_id_stay_text(tmp_path: Path) -> None:
    """A padding token that the vocabulary lacks would get an id past the model's last one."""
    config = {
        "pad_token": "[PAD]",
        "added_tokens_decoder": {str(FREE["byte_level"] + 7): END, "x": END, "7": [], "8": {"content": 5}},
        "extra_special_tokens": ["<new>", 5],
    }
    path = directory(tmp_path, "byte_level", config)
    ours = Tokenizer(path)
    plain = HfTokenizer.from_file(str(path / "tokenizer.json"))
    text = "[PAD]<new><|end|>"
    assert ours.encode(text, False) == plain.encode(text).ids
    assert ours.vocab_size == FREE["byte_level"]


def test_tokens_past_the_vocabulary_of_the_model(tmp_path: Path) -> None:
    """Gemma 3's tokenizer has a token for images, for which its text model has no embedding."""
    path = directory(tmp_path, "byte_level", CONFIGS["numbered"])
    ours, own = Tokenizer(path), FREE["byte_level"]
    assert ours.beyond(own + 1) == ([], 0)
    assert ours.beyond(own) == (["<|end|>"], 0)
    assert ours.beyond(own - 4) == (["<plain é>", "<|end|>"], 3)
