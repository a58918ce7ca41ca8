"""The tokenizer: byte-level BPE over words without their blanks, with the marker tokens of Qwen3.

A word has the same token after a blank, a quote or at the start of a line, so a name can be copied from a question into
the JSON of a call. `build` is deterministic.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from deploy.tiny_models.tool_calls.chat_form import (
    CONTROL,
    END,
    MARKERS,
    PAD,
    START,
    TEMPLATE,
    WHOLE,
    segments,
)
from deploy.tiny_models.tool_calls.conversations import KINDS, TRAINED, Conversations

VOCAB_SIZE = 640
MAX_POSITIONS = 4096
# letters, one digit, signs with the blank before them, or white space
PIECES = r"\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+"


def build(sample: int = 4000) -> Tokenizer:
    """Train the BPE on conversations of the training split."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[AddedToken(text, normalized=False) for text in (*CONTROL, *MARKERS)],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_sample_text(sample), trainer)
    return _with_plain_markers(tokenizer)


def _with_plain_markers(tokenizer: Tokenizer) -> Tokenizer:
    """Make the markers parts of decoded text, as in Qwen3. The trainer makes all its added tokens special."""
    described = json.loads(tokenizer.to_str())
    for token in described["added_tokens"]:
        token["special"] = token["content"] in CONTROL
    plain: Tokenizer = Tokenizer.from_str(json.dumps(described))
    return plain


def _sample_text(sample: int) -> Iterator[str]:
    """Yield the texts between markers; of declared tools, which are long, only some."""
    source = Conversations(0, "train")
    marks = re.compile("|".join(map(re.escape, (*CONTROL, *MARKERS))))
    for index in range(sample):
        head, *others = (text for text, _ in segments(source.draw(KINDS, TRAINED), WHOLE))
        for text in [head, *others] if index % 4 == 0 else others:
            yield from (piece for piece in marks.split(text) if piece)


def write(tokenizer: Tokenizer, directory: Path) -> None:
    """Write tokenizer.json, its settings and the chat template."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    named: dict[str, object] = {"eos_token": END, "pad_token": PAD, "additional_special_tokens": [START]}
    settings = {
        **named,
        "clean_up_tokenization_spaces": False,
        "model_max_length": MAX_POSITIONS,
        "padding_side": "left",
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    for name, content in (("tokenizer_config.json", settings), ("special_tokens_map.json", named)):
        (directory / name).write_text(json.dumps(content, indent=2) + "\n")
    (directory / "chat_template.jinja").write_text(TEMPLATE)
