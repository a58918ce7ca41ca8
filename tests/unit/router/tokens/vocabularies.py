"""Small tokenizers of each kind, made in memory and saved as tokenizer.json."""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers.trainers import BpeTrainer

CORPUS = [
    "Hello world, this is a test of the answer. é € 漢字 😀 END stop " * 3,
    "the answer is END\n\n 12 ünïcode",
]


def byte_level() -> Tokenizer:
    """Make a byte-level BPE as in GPT-2, Llama 3 and Qwen: merges cross character borders."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=360,
        show_progress=False,
        special_tokens=["<s>", "</s>", "<|x y|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    made.train_from_iterator(CORPUS, trainer)
    made.add_tokens([AddedToken("<plain é>", special=False)])
    return made


def _with_bytes(extra: list[str]) -> dict[str, int]:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *extra]
    return {token: number for number, token in enumerate(tokens)}


def llama2() -> Tokenizer:
    """SentencePiece BPE with byte fallback: words begin with U+2581, and the first space is dropped."""
    letters = sorted(set("".join(CORPUS)) - set("漢字😀€ \n"))
    vocabulary = _with_bytes(["▁", *letters, "▁t", "he", "▁the", "▁▁"])
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("▁", "▁")]
    made = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return made


def metaspace() -> Tokenizer:
    """A Unigram tokenizer with the Metaspace decoder."""
    letters = sorted(set("".join(CORPUS)) - set(" \n"))
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("▁", -3.0), ("▁the", -2.0), ("▁answer", -2.0)]
    made = Tokenizer(models.Unigram([*pieces, *((each, -5.0) for each in letters)], 0, False))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    made.add_special_tokens(["<unk>", "<s>"])
    return made


def words() -> Tokenizer:
    """A tokenizer without a decoder: tokens are joined with spaces."""
    made = Tokenizer(models.WordLevel({"<unk>": 0, "the": 1, "answer": 2, "END": 3, "12": 4}, "<unk>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r"\s+"), "removed")
    return made


KINDS = {"byte_level": byte_level, "llama2": llama2, "metaspace": metaspace, "words": words}


def save(kind: str, folder: Path) -> Path:
    KINDS[kind]().save(str(folder / "tokenizer.json"))
    return folder
