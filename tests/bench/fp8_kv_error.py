"""What FP8 keys and values cost in accuracy: logits of solved word problems, and answers to new ones.

    python -m tests.bench.fp8_kv_error [--models tiny-target tiny-moe] [--count 50] [--json FILE]

Every text is computed twice in this process, with pages in the model's dtype and in FP8. Logits are those of the
answers' tokens. Runs on the CPU.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from common.engine.forward.batch import ForwardMode
from common.engine.forward.model_runner import load_model
from common.engine.models.causal_lm import CausalLM
from common.kv_cache.kv_values import AS_COMPUTED, FP8, KvValues
from deploy.tiny_models import tokenizer as family
from deploy.tiny_models.prompts import few_shot_prompt
from deploy.tiny_models.word_problems import exam, is_right
from tests.unit.engine.paged_driver import Driver

MODELS = Path(__file__).parents[2] / "deploy" / "tiny_models"
MAX_NEW_TOKENS = 64
PAGE = 16


@dataclass(frozen=True)
class Row:
    model: str
    texts: int
    tokens: int  # tokens of all answers
    spread: float  # standard deviation of the logits
    mean_error: float  # per logit
    most_error: float
    same_token: float  # share of tokens that have the largest logit in both
    right: int  # answers, with pages in the model's dtype
    right_fp8: int


def logits_of(model: CausalLM, ids: Sequence[int], after: int, kv: KvValues) -> Tensor:
    """Return the logits [n, V] after each token of a text from index `after` on; the prefix is a chunk of its own."""
    driver = Driver(model, [torch.tensor(ids)], PAGE, kv=kv)
    driver.run([0], [after])
    return driver.run([0], [len(ids) - after]).logits


def answer(model: CausalLM, prompt: Sequence[int], end: int, kv: KvValues) -> list[int]:
    """Return the greedy answer up to the token `end`."""
    text = torch.zeros(len(prompt) + MAX_NEW_TOKENS, dtype=torch.int64)
    text[: len(prompt)] = torch.tensor(prompt)
    driver = Driver(model, [text], PAGE, kv=kv)
    logits = driver.run([0], [len(prompt)]).logits
    new: list[int] = []
    while len(new) < MAX_NEW_TOKENS and (token := int(logits[-1].argmax())) != end:
        text[len(prompt) + len(new)] = token
        new.append(token)
        logits = driver.run([0], [1], ForwardMode.DECODE).logits
    return new


@torch.inference_mode()
def measure(name: str, count: int) -> Row:
    model, _ = load_model(MODELS / name, "float32", torch.device("cpu"))
    tokenizer = Tokenizer.from_file(str(MODELS / name / "tokenizer.json"))
    end, eight_bits = family.id_of(tokenizer, family.END), KvValues(FP8)
    exact, errors, same, right = [], [], [], [0, 0]
    for shots, problem in exam(count, 2_024, 4):
        prompt = family.BOS + few_shot_prompt(shots, problem.question)
        asked = tokenizer.encode(prompt, add_special_tokens=False).ids
        solved = tokenizer.encode(f"{prompt} {problem.answer}", add_special_tokens=False).ids
        begin = len(asked) - 1
        wide, narrow = (logits_of(model, solved, begin, kv) for kv in (AS_COMPUTED, eight_bits))
        exact.append(wide)
        errors.append((wide - narrow).abs())
        same.append(wide.argmax(-1) == narrow.argmax(-1))
        for index, kv in enumerate((AS_COMPUTED, eight_bits)):
            right[index] += is_right(problem, tokenizer.decode(answer(model, asked, end, kv)))
    error = torch.cat(errors)
    return Row(
        model=name,
        texts=count,
        tokens=len(error),
        spread=torch.cat(exact).std().item(),
        mean_error=error.mean().item(),
        most_error=error.max().item(),
        same_token=torch.cat(same).float().mean().item(),
        right=right[0],
        right_fp8=right[1],
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=["tiny-target", "tiny-moe", "tiny-hybrid"])
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    for name in options.models:
        rows.append(measure(name, options.count))
        print(json.dumps(asdict(rows[-1])), flush=True)
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")


if __name__ == "__main__":
    main()
