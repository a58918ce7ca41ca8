"""The models' tokenizer and chat template, written as standard Hugging Face files.

Byte-level BPE with single digits, trained on the task's own text; `build` is deterministic. As a program,
`python -m deploy.tiny_models.tokenizer DIR` rewrites the files next to `DIR/tokenizer.json` that do not depend on
training.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from deploy.tiny_models.prompts import ANSWER, QUESTION, SYSTEM_SENTENCES
from deploy.tiny_models.word_problems import problems

PAD, BOS, END = "<|pad|>", "<|bos|>", "<|end|>"
SYSTEM, USER, ASSISTANT, IMAGE = "<|system|>", "<|user|>", "<|assistant|>", "<image>"
SPECIALS = (PAD, BOS, END, SYSTEM, USER, ASSISTANT, IMAGE)  # ids 0..6, in this order

VOCAB_SIZE = 704
MAX_POSITIONS = 4096

# A message is `<|role|> content<|end|>\n`. The template trims the content and adds one space before it, so a word has
# the same id at the start as inside a sentence. An answer that returns as an earlier turn (with the space it was
# generated with) yields the same ids as when it was generated, which prefix caches rely on.
CHAT_TEMPLATE = """\
{{- '<|bos|>' }}
{%- for message in messages %}
    {%- if message['role'] not in ['system', 'user', 'assistant'] %}
        {{- raise_exception('unknown role ' + message['role'] + ': use system, user or assistant') }}
    {%- endif %}
    {%- if message['content'] is string %}
        {%- set content = message['content'] %}
    {%- else %}
        {%- set parts = namespace(text='') %}
        {%- for part in message['content'] %}
            {%- if part['type'] == 'text' %}
                {%- set parts.text = parts.text + part['text'] %}
            {%- else %}
                {{- raise_exception('content of type ' + part['type'] + ': this model reads text only') }}
            {%- endif %}
        {%- endfor %}
        {%- set content = parts.text %}
    {%- endif %}
    {{- '<|' + message['role'] + '|> ' + content | trim + '<|end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>' }}
{%- endif %}
"""


def build(sample: int = 8000) -> Tokenizer:
    """Train the BPE on problems of the training split.

    Questions and answers are passed separately: the text between two shots never occurs, so no merge can span it and
    `\\n\\n` stays two tokens whether or not a question follows.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[AddedToken(text, special=True, normalized=False) for text in SPECIALS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_sample_text(sample), trainer)
    bos = tokenizer.token_to_id(BOS)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, bos)]
    )
    return tokenizer


def _sample_text(sample: int) -> Iterator[str]:
    rng = random.Random("tokenizer")
    for problem in islice(problems(seed=0, split="train"), sample):
        yield f" {problem.question}"
        yield f" {problem.answer}"
        yield rng.choice((QUESTION, ANSWER, f" {rng.choice(SYSTEM_SENTENCES)}"))


def id_of(tokenizer: Tokenizer, token: str) -> int:
    """Return the id of a token that the vocabulary has."""
    found = tokenizer.token_to_id(token)
    assert found is not None, token
    return found


def write(tokenizer: Tokenizer, directory: Path) -> None:
    """Write tokenizer.json and its companion files."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    write_companions(directory)


def write_companions(directory: Path) -> None:
    """Write the files that are the same for every tokenizer of the family.

    They are written by hand rather than with `save_pretrained`: transformers 5 writes a class name that transformers 4
    and other engines do not know, and omits special_tokens_map.json.
    """
    named = {"bos_token": BOS, "eos_token": END, "pad_token": PAD}
    extra = [SYSTEM, USER, ASSISTANT, IMAGE]
    config = {
        **named,
        "additional_special_tokens": extra,
        "clean_up_tokenization_spaces": False,
        "model_max_length": MAX_POSITIONS,
        "padding_side": "left",
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    _write_json(directory / "tokenizer_config.json", config)
    _write_json(directory / "special_tokens_map.json", {**named, "additional_special_tokens": extra})
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    write_companions(parser.parse_args().directory)
