"""Compares greedy texts of the tiny models with experts, over HTTP, with those of transformers in many settings.

    python -m tests.cluster.check_families [hybrid] [moe]

CI has no time for so many clusters: sizes of chunks, transports, two nodes of each role, a killed decode node, a pool
too small for all requests at once. Every setting serves the prompts twice, the second time from the prefix cache. It
prints a line of JSON per setting; the exit code is 1 if any text differs or a setting has a problem. All settings take
some minutes on two cores.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
import yaml

from deploy.tiny_models.drafts import measure
from deploy.tiny_models.language_model import LanguageModel
from deploy.tiny_models.mixture import checkpoint
from deploy.tiny_models.mixture.shapes import FAMILIES
from router.tokens.tokenizer import Tokenizer
from tests.cluster.harness import ROOT, Answer, Client, RunningCluster
from tests.fakes.waiting import PATIENCE

SAID = 40  # tokens per answer
SMALL_POOL = 48 * 16  # tokens: a long request and some short ones, which take pages from each other
Config = dict[str, Any]


def shipped(family: str) -> Config:
    """Return the sections of deploy/clusters/local-FAMILY.yaml, with absolute paths."""
    return absolute(ROOT / "deploy" / "clusters" / f"local-{family}.yaml")


def absolute(file: Path) -> Config:
    """Return the sections of a cluster file, with absolute paths of its models."""
    sections: Config = yaml.safe_load(file.read_text())
    for section, key in (("model", "path"), ("speculation", "draft_model_path")):
        if key in sections.get(section, {}):
            sections[section][key] = str((file.parent / sections[section][key]).resolve())
    return sections


@torch.inference_mode()
def generated(model: LanguageModel, prompt: list[int], count: int) -> list[int]:
    """Return the greedy continuation by transformers."""
    settings = transformers.GenerationConfig(
        max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    untyped: Any = model  # the stubs of transformers refuse `generate` on this class
    untyped.generation_config.eos_token_id = None  # otherwise it counts where `settings` has none
    out = untyped.generate(torch.tensor([prompt]), generation_config=settings)
    ids: list[int] = out[0, len(prompt) :].tolist()
    return ids


def prompts_of(directory: Path, count: int) -> list[list[int]]:
    """Return `count` chats, as many documents of some hundred tokens, and as many beginnings of questions."""
    encoder = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    texts = [text for suite in measure.suites(count) for text in suite.prompts]
    return [encoder.encode(text, add_special_tokens=False).ids for text in texts]


@dataclass(frozen=True)
class Setting:
    """One cluster; `kill`: decode-0 is killed while it generates."""

    chunk: int = 2048
    transport: str = "shm"
    nodes: int = 1  # per role
    kill: bool = False
    pool: int | None = None  # tokens of a decode node's pool
    times: int = 1  # how often each prompt is asked at the same time

    def config(self, family: str) -> Config:
        sections = shipped(family)
        sections["prefill"] = {"chunk_tokens": self.chunk}
        sections["transfer"] = {"transport": self.transport}
        sections["decode"] = {"read_results": "one_behind"}
        if self.pool is not None:
            sections["decode"] |= {"pool_tokens": self.pool, "reserved_tokens": 0}
        return sections


SETTINGS = (
    *(Setting(chunk) for chunk in (1, 7, 63, 64, 65)),
    Setting(transport="tcp"),
    Setting(pool=SMALL_POOL, times=3),  # or a fast machine answers before requests need each other's pages
    Setting(nodes=2),
    Setting(chunk=64, transport="tcp", nodes=2, kill=True),
)


async def answers(cluster: RunningCluster, prompts: list[list[int]], kill: bool) -> list[Answer]:
    """Serve the prompts at once; with `kill`, decode-0 is killed once it has requests."""
    async with Client(cluster.url) as client:
        asked = asyncio.create_task(client.complete_all(prompts, len(prompts), SAID))
        deadline = time.monotonic() + PATIENCE
        while kill and not (await client.node("decode-0"))["load"]["running"]:
            assert time.monotonic() < deadline, "decode-0 got no request"
            await asyncio.sleep(0.01)
        if kill:
            cluster.kill("decode-0")
        return await asked


async def run(family: str, setting: Setting, prompts: list[list[int]], expected: list[list[str]]) -> Config:
    """Return what a setting gave; `problem`: why it does not show what it should, apart from wrong texts."""
    prompts, expected = setting.times * prompts, setting.times * expected
    with tempfile.TemporaryDirectory() as directory:
        both = setting.nodes, setting.nodes
        async with RunningCluster(Path(directory), *both, config=setting.config(family)) as cluster:
            found = [await answers(cluster, prompts, kill) for kill in (False, setting.kill)]
            async with Client(cluster.url) as client:
                await client.wait_idle()
                info = await client.info()
    decodes = [node for node in info["nodes"] if node["role"] == "decode"]
    lengths = [state["avg_spec_accept_length"] for state in info["internal_states"]]
    retractions = sum(node["counters"]["retractions"] for node in decodes)
    unused = setting.pool is not None and not retractions
    return {
        "family": family,
        "setting": {key: getattr(setting, key) for key in Setting.__dataclass_fields__},
        "wrong": sum(
            answer.tokens != text for each in found for answer, text in zip(each, expected, strict=True)
        ),
        "answers": 2 * len(prompts),
        "cached": sum(answer.usage["prompt_tokens_details"]["cached_tokens"] for answer in found[1]),
        "retractions": retractions,
        "problem": "the small pool was large enough for all requests" if unused else "",
        "accept_lengths": [round(length, 3) for length in lengths],
    }


def check(family: str) -> Iterator[Config]:
    """Yield the result of each setting."""
    directory = Path(shipped(family)["model"]["path"])
    model, _ = checkpoint.load(directory, FAMILIES[family])
    prompts, names = prompts_of(directory, 3), Tokenizer(directory)
    expected = [[names.token_text(id) for id in generated(model, prompt, SAID)] for prompt in prompts]
    for setting in SETTINGS:
        yield asyncio.run(run(family, setting, prompts, expected))


def main() -> int:
    """Check the named families, by default both."""
    failed = False
    for family in sys.argv[1:] or ("hybrid", "moe"):
        for result in check(family):
            print(json.dumps(result), flush=True)
            failed = failed or bool(result["wrong"] or result["problem"])
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
